"""The figures of `database.stats` as OpenTelemetry metrics, where its API is installed.

They are named `tokencustody.<name>`. Each database has its own series, by the attribute `database`: host, port and
name, or the file, never a password. Retries have the attribute `cause` too. Whoever sets a meter provider gets them.

Its API is imported with this module: what a call imported, a fork in another thread would leave locked in the child.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import TYPE_CHECKING

from tokencustody.database import registry
from tokencustody.database.stats import STATS, Kind, Stat

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions

try:
    from opentelemetry import metrics
except ImportError:
    metrics = None  # type: ignore[assignment]


@cache
def publish() -> bool:
    """Offer the figures of this process to OpenTelemetry, once; return whether its API is there."""
    if metrics is None:
        return False
    meter = metrics.get_meter("tokencustody")
    causes = [stat for stat in STATS if stat.cause is not None]
    for stat in STATS:
        if stat.cause is not None:
            continue
        # In `stats()` the sum stands beside its parts; here it would be counted twice.
        shown = causes if stat.name == "retries" else [stat]
        create = (
            meter.create_observable_counter
            if stat.kind is Kind.COUNTER
            else meter.create_observable_up_down_counter
        )
        create(f"tokencustody.{stat.name}", [partial(_observe, shown)], description=stat.text)
    return True


def _observe(shown: Iterable[Stat], _options: CallbackOptions) -> Iterable[metrics.Observation]:
    for database in registry.databases():
        counted = registry.stats_of(database)
        for stat in shown:
            attributes = {"database": database.display}
            if stat.cause is not None:
                attributes["cause"] = stat.cause
            yield metrics.Observation(counted[stat.name], attributes)
