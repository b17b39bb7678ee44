"""The run itself: what it reports, what it refuses, and that it leaves nothing open."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.conformance.memory import Backend, Memory, factories
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

QUICK = [
    check.name for check in registered_checks() if check.name not in ("exact_long_lists", "strict_fence")
]


class Counted(Memory):
    """Counts the clients that are open."""

    open_clients = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).open_clients += 1
        self.is_open = True

    async def close(self) -> None:
        type(self).open_clients -= self.is_open
        self.is_open = False


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


class Minimal:
    """The methods of the first release: no intents, no refusals, no batches."""

    def __init__(self, backend: Backend) -> None:
        memory = Memory(backend)
        for method in ("put", "mark_incomplete", "freeze", "drop", "close"):
            setattr(self, method, getattr(memory, method))


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
        "aiosqlite",
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


async def test_every_client_is_closed() -> None:
    await run_conformance(**factories(Counted))
    assert Counted.open_clients == 0


async def test_missing_capabilities_are_reported_and_their_checks_not_applicable() -> None:
    backend = Backend()
    report = await check_conformance(
        lambda: Minimal(backend),
        lambda: Minimal(backend),
        ledger_factory=lambda: None,
        only=QUICK,
    )
    assert report.ok, report.summary()
    present = {capability.name for capability in report.capabilities if capability.present}
    assert present == {"records", "ledger"}
    for result in report.results:
        lacking = [need for need in result.needs if need not in present]
        assert (result.status == CheckStatus.NOT_APPLICABLE) == bool(lacking)
        assert not lacking or result.detail == f"the transport has no {', '.join(lacking)}"
    ledger = next(capability for capability in report.capabilities if capability.name == "ledger")
    assert "no checks" in ledger.detected


async def test_the_report_lists_every_rollout_that_was_written() -> None:
    backend = Backend()
    report = await check_conformance(lambda: Memory(backend), lambda: Memory(backend), only=QUICK)
    assert {rollout_id for _, rollout_id in backend.rollouts} <= set(report.rollout_ids)


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
