"""A next release, made of this one: one revision comes before its workers, and one after the last older worker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tokencustody.schema import migrate
from tokencustody.schema.revisions import WIRE_SCHEMAS

ROOT = Path(__file__).parents[2]
# Where a release is imported from.
THIS = ROOT / "src"
BEFORE, AFTER = "9001_origin", "9002_origin_known"

REVISION = '''"""{what}"""

from alembic import op

revision = "{name}"
down_revision = "{older}"
branch_labels = None
depends_on = None


def upgrade():
    for statement in {upgrade}:
        op.execute(statement)


def downgrade():
    for statement in {downgrade}:
        op.execute(statement)
'''
REVISIONS = (
    (
        BEFORE,
        migrate.HEAD,
        [
            "ALTER TABLE fences ADD COLUMN origin TEXT",
            "CREATE INDEX ix_fences_origin ON fences (run, origin)",
        ],
        ["DROP INDEX ix_fences_origin", "ALTER TABLE fences DROP COLUMN origin"],
    ),
    (
        AFTER,
        BEFORE,
        [
            "UPDATE fences SET origin = 'older' WHERE origin IS NULL",
            "UPDATE wire_schema SET version = 9002 WHERE name = 'tables'",
        ],
        [f"UPDATE wire_schema SET version = {WIRE_SCHEMAS['tables']} WHERE name = 'tables'"],
    ),
)
KNOWN = f"""
REVISIONS = (*REVISIONS, "{BEFORE}", "{AFTER}")
HEAD, OLDEST = "{AFTER}", "{{oldest}}"
WIRE_SCHEMAS[TABLES] = 9002
"""
TABLES = """
from sqlalchemy import Index
fences.append_column(Column("origin", Text))
Index("ix_fences_origin", fences.c.run, fences.c.origin)
"""


def make_next(folder: Path, oldest: str = BEFORE) -> Path:
    """Make the next release in `folder`, which works with `oldest` and later; return from where it is imported."""
    package = folder / "tokencustody"
    # What is compiled comes along, for it goes by the times of the files; half-written it has a longer name.
    shutil.copytree(THIS / "tokencustody", package, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, older, upgrade, downgrade in REVISIONS:
        text = REVISION.format(what=name, name=name, older=older, upgrade=upgrade, downgrade=downgrade)
        (package / "schema" / "migrations" / "versions" / f"{name}.py").write_text(text)
    for module, added in (("revisions", KNOWN.format(oldest=oldest)), ("tables", TABLES)):
        with (package / "schema" / f"{module}.py").open("a") as file:
            file.write(added)
    return folder


def environment(release: Path) -> dict[str, str]:
    """Return an environment in which Python imports that release."""
    return os.environ | {"PYTHONPATH": f"{release}{os.pathsep}{ROOT}"}


def run(release: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of that release to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tokencustody", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment(release),
        cwd=release,
    )


class Workers:
    """Two processes of a release that write all the while."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def go_on(self) -> None:
        """Return when every task of every process has written rollouts that it began since."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("on\n")
            process.stdin.flush()
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "went on\n", process.communicate()

    def stop(self) -> list[str]:
        """End them, and return what each reports."""
        ended = [(*process.communicate(), process.returncode) for process in self._processes]
        assert [(said, code) for _, said, code in ended] == [("", 0)] * len(ended), ended
        return [out for out, _, _ in ended]


@contextmanager
def working(release: Path, url: str, name: str) -> Iterator[Workers]:
    """Let workers of that release write to a database."""
    with ExitStack() as stack:
        processes = []
        for number in range(2):
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.schema.working", url, f"{name}-{number}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(release),
                cwd=release,
            )
            stack.callback(_end, process)
            processes.append(process)
        yield Workers(processes)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.communicate()
