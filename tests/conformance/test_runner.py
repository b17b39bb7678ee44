"""The run itself: what it reports, what it refuses, and that it leaves nothing open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest

from tests.conformance.ledger import MemoryLedger
from tests.conformance.memory import Backend, Memory
from tests.conformance.staging import MemoryStaging
from tests.conformance.transport import factories
from tokencustody.conformance import (
    CheckStatus,
    ConformanceError,
    check_conformance,
    registered_checks,
    run_conformance,
)
from tokencustody.conformance.expect import difference
from tokencustody.protocols import TokenCaptureSnapshot
from tokencustody.records import TokenEntry
from tokencustody.staging.records import StagedCallBaseSnapshot, StagedCallRecord, StageResult

QUICK = [
    check.name for check in registered_checks() if check.name not in ("exact_long_lists", "strict_fence")
]


class Counting:
    """Counts the clients that were made and those that are open."""

    made = open_clients = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made += 1
        type(self).open_clients += 1
        self.is_open = True

    def count_close(self) -> None:
        type(self).open_clients -= self.is_open
        self.is_open = False


class Counted(Counting, Memory):
    async def close(self) -> None:
        self.count_close()


class CountedLedger(Counting, MemoryLedger):
    async def close(self) -> None:
        self.count_close()


class CountedStaging(Counting, MemoryStaging):
    def close(self) -> None:
        self.count_close()


class NoSuchThing(Memory):
    """Every freeze fails, with a message that a markup language could misread."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        raise OSError("[no] such thing")


class Hangs(Memory):
    async def put(self, entry: TokenEntry) -> None:
        await asyncio.Event().wait()


class CloseRaises(Memory):
    async def close(self) -> None:
        raise OSError("still busy")


class StageHangs(MemoryStaging):
    def stage(self, record: StagedCallRecord, **options: Any) -> StageResult:
        threading.Event().wait()
        raise AssertionError("nobody sets the event")


class Limited:
    """A client with some of the methods of another, and so of one release or another of the protocols."""

    def __init__(self, client: Any, *methods: str) -> None:
        for method in methods:
            setattr(self, method, getattr(client, method))


def first_release(backend: Backend) -> Limited:
    """A sink and source without intents, refusals or batches."""
    return Limited(Memory(backend), "put", "mark_incomplete", "freeze", "drop", "close")


def token_free_release(backend: Backend) -> Limited:
    """A ledger that cannot retire or delete."""
    methods = ("record", "record_failure", "manifest", "has_rows", "resolve", "is_process_shared", "close")
    return Limited(MemoryLedger(backend), *methods)


class PlainStaging:
    """The two methods of the staging protocols, without attachments and with nothing to close."""

    def __init__(self, backend: Backend) -> None:
        self.memory = MemoryStaging(backend)

    def stage(self, record: StagedCallRecord) -> StageResult:
        return self.memory.stage(record)

    def fetch(self, staging_keys: list[str]) -> list[StagedCallBaseSnapshot]:
        return self.memory.fetch(staging_keys)


async def test_the_names_of_the_passed_checks_are_returned() -> None:
    assert await run_conformance(**factories(), only=QUICK) == QUICK


async def test_the_ten_published_checks_are_among_the_registered_ones() -> None:
    published = {
        "put_then_freeze",
        "idempotent_reput",
        "conflicting_reput",
        "mark_incomplete",
        "freeze_idempotency",
        "post_freeze_write",
        "conditional_retirement",
        "lineage_visibility",
        "lineage_visibility_fresh_client",
        "begin_call_custody",
    }
    assert published <= {check.name for check in registered_checks()}
    assert all(check.promise for check in registered_checks())


async def test_a_second_run_over_the_same_backend_passes_too() -> None:
    arguments = factories()
    for _ in range(2):
        await run_conformance(**arguments, only=QUICK)


async def test_every_failed_check_is_named_in_the_error_with_its_detail() -> None:
    with pytest.raises(ConformanceError) as caught:
        await run_conformance(**factories(NoSuchThing), only=["put_then_freeze", "lineage_root", "deletion"])
    report = caught.value.report
    assert [result.name for result in report.failed] == ["put_then_freeze", "deletion"]
    assert report.passed == ["lineage_root"]
    assert str(caught.value).splitlines() == [
        "1 checks passed, 2 failed, 0 not applicable",
        "  put_then_freeze: raised OSError: [no] such thing",
        "  deletion: raised OSError: [no] such thing",
    ]


async def test_a_run_in_which_nothing_applies_is_a_failure() -> None:
    backend = Backend()
    with pytest.raises(ConformanceError, match="no check was run") as caught:
        await run_conformance(lambda: Memory(backend), lambda: Memory(backend), only=["lineage_root"])
    assert [result.status for result in caught.value.report.results] == [CheckStatus.NOT_APPLICABLE]
    with pytest.raises(ConformanceError, match="no check was run"):
        await run_conformance(lambda: Memory(backend), lambda: Memory(backend), only=[])


async def test_an_unknown_check_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no check is named put_then_thaw; there are put_then_freeze, "):
        await check_conformance(**factories(), only=["put_then_thaw"])


async def test_a_rollout_id_outside_the_rules_is_refused_before_anything_runs() -> None:
    for bad in ("", "a/b", "r" * 191):
        with pytest.raises(ValueError, match="rollout_id"):
            await check_conformance(**factories(), rollout_id=bad)
    report = await check_conformance(**factories(), rollout_id="r" * 190, only=QUICK)
    assert report.ok, report.summary()


def test_the_kit_loads_no_database_driver_and_no_server() -> None:
    program = (
        "import sys, tokencustody.conformance as kit; kit.registered_checks(); print(*sys.modules, sep='\\n')"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert not packages & {
        "sqlalchemy",
        "asyncpg",
        "alembic",
        "fastapi",
        "typer",
        "rich",
        "nemo_gym",
    }


async def test_a_factory_that_raises_is_a_failure_and_no_traceback() -> None:
    def factory() -> Memory:
        raise OSError("no such server")

    report = await check_conformance(factory, factory)
    assert not report.ok
    assert "no such server" in report.summary()


async def test_a_check_that_hangs_fails_at_the_timeout() -> None:
    report = await check_conformance(**factories(Hangs), only=["put_then_freeze"], timeout=0.05)
    assert [result.detail for result in report.failed] == ["not finished after 0.05 s"]


async def test_a_close_that_raises_fails_the_check() -> None:
    report = await check_conformance(**factories(CloseRaises), only=["lineage_root"])
    assert "still busy" in report.summary()
    assert not report.ok


async def test_a_stage_that_hangs_fails_its_check_at_the_timeout_and_blocks_nothing() -> None:
    arguments = factories(StageHangs)
    report = await check_conformance(**arguments, only=["fetch_order", "put_then_freeze"], timeout=0.05)
    assert [result.detail for result in report.failed] == ["not finished after 0.05 s"]
    assert report.passed == ["put_then_freeze"]


@pytest.mark.parametrize("counted", [Counted, CountedLedger, CountedStaging])
async def test_every_client_is_closed(counted: Any) -> None:
    await run_conformance(**factories(counted), only=QUICK)
    assert counted.made > 0
    assert counted.open_clients == 0


async def test_missing_capabilities_are_reported_and_their_checks_not_applicable() -> None:
    backend = Backend()
    client = partial(first_release, backend)
    report = await check_conformance(
        client,
        client,
        ledger_factory=partial(token_free_release, backend),
        staging_factory=partial(PlainStaging, backend),
        only=QUICK,
    )
    assert report.ok, report.summary()
    present = {capability.name for capability in report.capabilities if capability.present}
    assert present == {"records", "ledger", "staging"}
    for result in report.results:
        lacking = [need for need in result.needs if need not in present]
        assert (result.status == CheckStatus.NOT_APPLICABLE) == bool(lacking)
        assert not lacking or result.detail == f"the transport has no {', '.join(lacking)}"
    detected = {capability.name: capability.detected for capability in report.capabilities}
    assert detected["ledger_retire"] == "Limited has no method retire"
    assert detected["fetch_extras"] == "PlainStaging has no method fetch_extras"
    assert detected["attachments"] == "stage does not take attachments"


async def test_without_a_ledger_and_a_staging_store_their_checks_are_not_applicable() -> None:
    backend = Backend()
    report = await check_conformance(lambda: Memory(backend), lambda: Memory(backend), only=QUICK)
    assert report.ok, report.summary()
    by_name = {result.name: result.status for result in report.results}
    for check in registered_checks():
        if check.name in by_name and {"ledger", "staging"} & set(check.needs):
            assert by_name[check.name] == CheckStatus.NOT_APPLICABLE
    detected = {capability.name: capability.detected for capability in report.capabilities}
    assert detected["ledger"] == "ledger_factory not given"
    assert detected["staging"] == "staging_factory not given"
    assert "attachments" not in detected


async def test_the_report_lists_every_rollout_and_staging_key_that_was_written() -> None:
    backend = Backend()
    report = await check_conformance(
        lambda: Memory(backend),
        lambda: Memory(backend),
        ledger_factory=lambda: MemoryLedger(backend),
        staging_factory=lambda: MemoryStaging(backend),
        only=QUICK,
    )
    assert report.ok, report.summary()
    assert {rollout_id for _, rollout_id in backend.rollouts} <= set(report.rollout_ids)
    assert backend.staged.keys() <= {("run", key) for key in report.staging_keys}
    assert backend.staged


async def test_the_report_is_json() -> None:
    report = await check_conformance(**factories(), only=["put_then_freeze", "lineage_root"])
    data = json.loads(json.dumps(report.as_dict()))
    assert data["ok"] is True
    assert [result["status"] for result in data["results"]] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("put", "read"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (None, 0),
        ("a", "a\u0000"),
        ([1, 2], [1, 2, 3]),
        ([1, 2], [1, 3]),
        ([1, 1], [1, True]),
        ({"a": 1}, {"a": 1, "b": None}),
        ({"a": [{"b": 1.0}]}, {"a": [{"b": 1}]}),
        (float("nan"), -float("nan")),
    ],
)
def test_values_that_differ_in_type_or_bits_are_different(put: Any, read: Any) -> None:
    assert difference({"field": put}, {"field": read}) is not None


def test_equal_bits_are_the_same_value() -> None:
    value = {"a": [float("nan"), -0.0, float("inf")], "b": {"x": 1, "y": None}}
    assert difference(value, {"b": {"y": None, "x": 1}, "a": [float("nan"), -0.0, float("inf")]}) is None
