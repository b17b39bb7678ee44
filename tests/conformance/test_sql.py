"""The SQL stores keep every promise, on both databases."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import forked
from tokencustody.conformance import CheckStatus, ConformanceReport, check_conformance, registered_checks
from tokencustody.conformance import writers as writers_module
from tokencustody.database.coalescing import Coalesce
from tokencustody.states import Isolation
from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource

# What calls that share a transaction could spoil for one another.
SHARED = [
    "idempotent_reput",
    "conflicting_reput",
    "concurrent_identical_put",
    "concurrent_conflicting_put",
    "post_freeze_write",
    "post_freeze_intent",
    "concurrent_stages",
    "concurrent_conflicting_stages",
    "strict_fence",
]


async def check(
    url: str, coalesce: Coalesce, isolation: Isolation = Isolation.READ_COMMITTED, **options: Any
) -> ConformanceReport:
    # The modes are named, for the processes of the race make stores of their own.
    here: dict[str, Any] = {"url": url, "run": "here", "coalesce": coalesce, "isolation": isolation}
    there = {**here, "run": "there"}
    return await check_conformance(
        partial(SqlTokenSink, **here),
        partial(SqlTokenSource, **here),
        partial(SqlLineageStore, **here),
        other_namespace=(partial(SqlTokenSink, **there), partial(SqlTokenSource, **there)),
        ledger_factory=partial(SqlLineageStore, **here),
        staging_factory=partial(SqlStagingStore, **here),
        **options,
    )


@pytest.mark.serializable
@pytest.mark.quick("Strict fence")
@pytest.mark.race
async def test_the_sql_stores_pass_every_check(
    store_url: str, default_coalesce: Coalesce, default_isolation: Isolation
) -> None:
    report = await check(store_url, default_coalesce, default_isolation)
    assert [result.status for result in report.results] == [CheckStatus.PASSED] * len(registered_checks()), (
        report.summary()
    )
    assert "against 3 processes" in report.results[-1].detail


@pytest.fixture
def forked_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the kit's writers, which it spawns itself in the test above."""

    def process(target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
        made = forked.process(target, *args)
        made.daemon = daemon
        return made

    context = SimpleNamespace(Pipe=forked.CONTEXT.Pipe, Process=process)
    multiprocessing = SimpleNamespace(get_context=lambda method: context)
    monkeypatch.setattr(writers_module, "multiprocessing", multiprocessing)


@pytest.mark.race
@pytest.mark.parametrize("coalesce", list(Coalesce))
async def test_in_every_mode_the_fence_is_strict_and_a_call_is_stored_once(
    store_url: str, coalesce: Coalesce, forked_writers: None
) -> None:
    report = await check(store_url, coalesce, only=SHARED)
    assert [result.status for result in report.results] == [CheckStatus.PASSED] * len(SHARED), (
        report.summary()
    )
    assert "against 3 processes" in report.results[-1].detail
