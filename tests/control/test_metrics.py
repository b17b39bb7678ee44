"""What `GET /metrics` answers, read by Prometheus' own parser."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.control.serving import AUTH, RETIRE, TOKEN, serving
from tests.support.ledger import make_commit
from tokencustody.control import make_control_app
from tokencustody.control.metrics import CONTENT_TYPE, render_metrics
from tokencustody.database.faults import Cause
from tokencustody.database.stats import STATS, Kind
from tokencustody.store import SqlLineageStore


def test_every_figure_is_there_once_with_its_kind_and_text() -> None:
    figures = {stat.name: number for number, stat in enumerate(STATS, start=1)}
    families = {each.name: each for each in text_string_to_metric_families(render_metrics(figures))}
    assert sum(len(family.samples) for family in families.values()) == len(STATS) - 1
    for stat in STATS:
        if stat.name == "retries":
            continue
        family = families["tokencustody_retries" if stat.cause else f"tokencustody_{stat.name}"]
        labels = {"cause": stat.cause} if stat.cause else {}
        (sample,) = [each for each in family.samples if each.labels == labels]
        assert sample.value == figures[stat.name]
        assert sample.name == family.name + ("_total" if stat.kind is Kind.COUNTER else "")
        assert family.type == stat.kind
    assert {each.labels["cause"] for each in families["tokencustody_retries"].samples} == set(Cause)
    assert families["tokencustody_queue_depth"].documentation == "Calls that wait for a transaction."


async def test_the_counters_are_those_of_the_process_that_serves(ledger: SqlLineageStore) -> None:
    await ledger.record(make_commit("held"))
    async with (
        serving(make_control_app(ledger, auth_token=TOKEN, stats=ledger.stats)) as url,
        httpx.AsyncClient(base_url=url, headers=AUTH, trust_env=False) as client,
    ):
        before = await client.get("/metrics")
        await client.post(RETIRE, json={"rollout_ids": ["held"]})
        after = await client.get("/metrics")
    assert before.headers["content-type"] == CONTENT_TYPE
    transactions = [_value(answer.text, "tokencustody_transactions_total") for answer in (before, after)]
    assert 0 < transactions[0] < transactions[1]


async def test_without_figures_there_is_no_such_route(ledger: SqlLineageStore) -> None:
    async with (
        serving(make_control_app(ledger, auth_token=TOKEN)) as url,
        httpx.AsyncClient(base_url=url, headers=AUTH, trust_env=False) as client,
    ):
        assert (await client.get("/metrics")).status_code == 404


def _value(text: str, name: str) -> float:
    values = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]
    assert len(values) == 1
    return values[0]
