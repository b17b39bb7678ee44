"""What the stores of a process count, in the text format of Prometheus, version 0.0.4."""

from __future__ import annotations

from collections.abc import Mapping

from tokencustody.database.stats import STATS, Kind, Stat

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_metrics(stats: Mapping[str, int]) -> str:
    """Return the figures of `store.stats()`: `tokencustody_NAME_total` for counters, `tokencustody_NAME` for gauges.

    Retries are `tokencustody_retries_total` with the label `cause`; their sum is not a figure of its own.
    """
    families: dict[str, list[Stat]] = {}
    for stat in STATS:
        families.setdefault(stat.name.removesuffix(f"_{stat.cause}"), []).append(stat)
    lines: list[str] = []
    for family, members in families.items():
        first = members[0]
        name = f"tokencustody_{family}_total" if first.kind is Kind.COUNTER else f"tokencustody_{family}"
        lines += [f"# HELP {name} {first.text}", f"# TYPE {name} {first.kind}"]
        for stat in [each for each in members if each.cause] or members:
            label = f'{{cause="{stat.cause}"}}' if stat.cause else ""
            lines.append(f"{name}{label} {stats[stat.name]}")
    return "\n".join([*lines, ""])
