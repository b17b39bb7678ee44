"""The SQL stores keep every promise, on both databases."""

from __future__ import annotations

from functools import partial

import pytest

from tokencustody.conformance import CheckStatus, check_conformance, registered_checks
from tokencustody.store import SqlLineageStore, SqlStagingStore, SqlTokenSink, SqlTokenSource


@pytest.mark.race
async def test_the_sql_stores_pass_every_check(store_url: str) -> None:
    report = await check_conformance(
        partial(SqlTokenSink, url=store_url, run="here"),
        partial(SqlTokenSource, url=store_url, run="here"),
        partial(SqlLineageStore, url=store_url, run="here"),
        other_namespace=(
            partial(SqlTokenSink, url=store_url, run="there"),
            partial(SqlTokenSource, url=store_url, run="there"),
        ),
        ledger_factory=partial(SqlLineageStore, url=store_url, run="here"),
        staging_factory=partial(SqlStagingStore, url=store_url, run="here"),
    )
    assert [result.status for result in report.results] == [CheckStatus.PASSED] * len(registered_checks()), (
        report.summary()
    )
    assert "against 3 processes" in report.results[-1].detail
