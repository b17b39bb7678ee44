"""Every target, by the group that `--only` names."""

from __future__ import annotations

from campaigns.fuzzing import codec, commands, files, records, rows, spills
from campaigns.fuzzing.cases import Target


def groups(sqlite_url: str, postgresql_url: str | None) -> dict[str, tuple[Target, ...]]:
    """Return the targets; those of rows and of putting need a database of each kind, on the newest revision."""
    urls = {"sqlite": sqlite_url, "postgresql": postgresql_url}
    on = {name: url for name, url in urls.items() if url is not None}
    return {
        "codec": codec.TARGETS,
        "records": records.TARGETS,
        "put": tuple(Target(f"put-{name}", rows.putting(url)) for name, url in on.items()),
        "rows": tuple(Target(f"rows-{name}", rows.edited(url)) for name, url in on.items()),
        "sqlite": files.TARGETS,
        "spill": spills.TARGETS,
        "cli": commands.TARGETS,
    }


GROUPS = ("codec", "records", "put", "rows", "sqlite", "spill", "cli")
