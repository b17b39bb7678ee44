"""What NeMo Gym may expect of our stores: its conformance checks, configuration, signatures and errors."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import nemo_gym.token_id_capture as gym_capture
import nemo_gym.token_id_capture.protocols as gym_protocols
import pytest
from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry, TokenIdCaptureConfig
from nemo_gym.token_id_capture.conformance import run_conformance

import tokencustody
from tokencustody import errors, integrations, protocols
from tokencustody.integrations import nemo_gym as integration
from tokencustody.integrations.nemo_gym import SqlLineageStore, SqlTokenSink, SqlTokenSource

from .conftest import GymStores

MODULE = "tokencustody.integrations.nemo_gym"
PAIRS = [("TokenSink", SqlTokenSink), ("TokenSource", SqlTokenSource), ("LineageResolver", SqlLineageStore)]


def entry(rollout_id: str = "rollout-1", model_call_id: str = "call-1") -> TokenEntry:
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=model_call_id,
        prompt_token_ids=[1, 2, 3],
        generation_token_ids=[4, 5],
        generation_log_probs=[-0.5, -0.25],
    )


@pytest.mark.serializable
async def test_every_check_of_the_published_kit_passes(store_url: str) -> None:
    made: list[Any] = []

    def factory(store: type[Any]) -> Any:
        def fresh_client() -> Any:
            made.append(store(store_url))
            return made[-1]

        return fresh_client

    passed = await run_conformance(factory(SqlTokenSink), factory(SqlTokenSource), factory(SqlLineageStore))
    for client in made:
        await client.close()
    assert passed == [
        "put_then_freeze_visibility",
        "idempotent_reput",
        "conflicting_reput",
        "mark_incomplete_durability",
        "freeze_idempotency",
        "post_freeze_write_safety",
        "conditional_retirement",
        "lineage_visibility",
        "fresh_client_lineage_visibility",
        "begin_call_custody",
    ]


@pytest.mark.usefixtures("gym_configuration_works")
async def test_gyms_configuration_builds_a_sink_and_a_lineage_store_of_the_named_run(store_url: str) -> None:
    where = {"url": store_url, "run": "run-42"}
    config = TokenIdCaptureConfig(
        token_id_capture={
            "enabled": True,
            "sink": f"{MODULE}:SqlTokenSink",
            "sink_kwargs": where,
            "lineage_store": f"{MODULE}:SqlLineageStore",
            "lineage_store_kwargs": where,
        }
    )
    sink, lineage = config.build_sink(), config.build_lineage_store()
    assert isinstance(sink, SqlTokenSink)
    assert isinstance(lineage, SqlLineageStore)
    assert lineage.is_process_shared()
    async with (
        sink,
        lineage,
        SqlTokenSource(store_url, run="run-42") as source,
        SqlTokenSource(store_url) as other_run,
    ):
        await sink.put(entry())
        assert (await source.freeze("rollout-1")).entries == (entry(),)
        assert (await other_run.freeze("rollout-1")).entries == ()


def test_gym_installs_our_stores_in_its_process() -> None:
    sink, source, lineage = (store("sqlite:///unused.db") for _, store in PAIRS)
    try:
        gym_capture.install_token_sink(sink)
        gym_capture.install_token_source(source)
        gym_capture.install_lineage_store(lineage)
        assert gym_capture.installed_token_sink() is sink
        assert gym_capture.installed_token_source() is source
        assert gym_capture.installed_lineage_store() is lineage
    finally:
        gym_capture.install_token_sink(None)
        gym_capture.install_token_source(None)
        gym_capture.install_lineage_store(None)


@pytest.mark.parametrize(("name", "store"), PAIRS)
def test_the_stores_satisfy_the_protocols_of_the_installed_release(name: str, store: type[Any]) -> None:
    assert isinstance(store("sqlite:///unused.db"), getattr(gym_capture, name))


@pytest.mark.parametrize(("name", "store"), PAIRS)
def test_the_stores_have_the_protocols_parameters_by_position_and_by_keyword(
    name: str, store: type[Any]
) -> None:
    reference = getattr(protocols, name)
    installed = getattr(gym_capture, name)
    methods = [method for method in vars(reference) if not method.startswith("_")]
    assert methods
    for method in methods:
        parameters = inspect.signature(getattr(store, method)).parameters.values()
        wanted = inspect.signature(getattr(reference, method)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in parameters] == [
            (p.name, p.kind, p.default) for p in wanted
        ]
        if hasattr(installed, method):
            published = inspect.signature(getattr(installed, method)).parameters
            assert [p.name for p in parameters] == list(published)


async def test_a_consumed_snapshot_is_dropped_by_position_and_by_keyword(gym: GymStores) -> None:
    await gym.sink.put(entry("a"))
    await gym.sink.put(entry("b"))
    a, b = await gym.source.freeze("a"), await gym.source.freeze("b")
    assert await gym.source.drop("a", a.snapshot_id, a.version)
    assert await gym.source.drop("b", snapshot_id=b.snapshot_id, version=b.version)


async def test_snapshot_and_decision_are_gyms_own_types(gym: GymStores) -> None:
    request = [{"role": "user", "content": "What is the capital of France?"}]
    root = entry()
    root.output_items = [{"role": "assistant", "content": "Paris."}]
    gym_capture.stamp_lineage(root, None, parent_resolution=gym_capture.ParentResolutionStatus.ROOT)
    gym_capture.stamp_continuation(root, request)
    await gym.sink.put(root)

    follow_up = [*request, *root.output_items, {"role": "user", "content": "And of Italy?"}]
    decision = await gym.lineage.resolve("rollout-1", follow_up)
    match = gym_capture.LineageMatch("call-1", (1, 2, 3, 4, 5), root.digest, prev_len=5)
    assert decision == gym_capture.LineageResolution(gym_capture.ParentResolutionStatus.RESOLVED, match)
    assert type(decision.status) is gym_capture.ParentResolutionStatus
    unknown = [*request, {"role": "assistant", "content": "Rome."}]
    assert await gym.lineage.resolve("rollout-1", unknown) == gym_capture.LineageResolution(
        gym_capture.ParentResolutionStatus.UNRESOLVED, reason="no_match"
    )

    snapshot = await gym.source.freeze("rollout-1")
    assert snapshot == gym_capture.TokenCaptureSnapshot(
        "rollout-1", (root,), False, snapshot.snapshot_id, snapshot.version
    )
    assert type(snapshot.entries[0].parent_resolution) is gym_capture.ParentResolutionStatus


async def test_what_gym_writes_is_read_by_the_plain_store_and_the_other_way_round(
    store_url: str, gym: GymStores
) -> None:
    async with tokencustody.open_store(store_url) as store:
        await gym.sink.put(entry("written-by-gym"))
        (read,) = (await store.source.freeze("written-by-gym")).entries
        assert type(read) is tokencustody.TokenEntry
        assert read.model_dump() == entry("written-by-gym").model_dump()

        await store.sink.put(tokencustody.TokenEntry(**entry("written-by-us").model_dump()))
        assert (await gym.source.freeze("written-by-us")).entries == (entry("written-by-us"),)


async def test_a_refused_call_leaves_the_rollout_complete(gym: GymStores) -> None:
    await gym.sink.begin_call("rollout-1", "call-1")
    await gym.sink.refuse_call("rollout-1", model_call_id="call-1", code="context_length_exceeded")
    assert not (await gym.source.freeze("rollout-1")).incomplete


async def test_retire_and_delete_work_in_batches(gym: GymStores) -> None:
    await gym.sink.put(entry("a"))
    assert await gym.source.retire(["a", "b"]) == {"removed": ["a"], "absent": ["b"]}
    with pytest.raises(errors.TokenCaptureRetiredError):
        await gym.sink.put(entry("a"))
    assert await gym.source.delete(["a", "b"]) == {"removed": [], "absent": ["a", "b"]}
    await gym.sink.put(entry("a"))


def gym_errors_of_a_later_release() -> dict[str, type[Exception]]:
    frozen = type("TokenCaptureFrozenError", (RuntimeError,), {})
    return {
        "TokenCaptureFrozenError": frozen,
        "TokenCaptureRetiredError": type("TokenCaptureRetiredError", (frozen,), {}),
        "RolloutRetiredError": type("RolloutRetiredError", (LookupError,), {}),
    }


@pytest.fixture
def peer_errors(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[Exception]]:
    """Gym's protocols with the errors of a later release than 0.7.0."""
    classes = gym_errors_of_a_later_release()
    for name, value in classes.items():
        monkeypatch.setattr(gym_protocols, name, value, raising=False)
    return classes


@pytest.fixture
def later_integration(peer_errors: dict[str, type[Exception]], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The integration as it is imported beside that release."""
    monkeypatch.setattr(integrations, "nemo_gym", integration)
    monkeypatch.delitem(sys.modules, MODULE)
    return importlib.import_module(MODULE)


async def test_late_writes_raise_errors_that_are_gyms_and_ours(
    store_url: str, later_integration: ModuleType, peer_errors: dict[str, type[Exception]]
) -> None:
    gyms_frozen, gyms_retired = (
        peer_errors["TokenCaptureFrozenError"],
        peer_errors["TokenCaptureRetiredError"],
    )
    async with (
        later_integration.SqlTokenSink(store_url) as sink,
        later_integration.SqlTokenSource(store_url) as source,
    ):

        def late_writes() -> list[Any]:
            return [
                sink.put(entry("a")),
                sink.begin_call("a", "call-2"),
                sink.refuse_call("a", model_call_id="call-2", code="too_long"),
            ]

        snapshot = await source.freeze("a")
        for write in late_writes():
            with pytest.raises(gyms_frozen, match="rollout a of run default is frozen") as caught:
                await write
            assert isinstance(caught.value, errors.TokenCaptureFrozenError)
            assert not isinstance(caught.value, errors.TokenCaptureRetiredError | gyms_retired)

        assert await source.drop("a", snapshot.snapshot_id, snapshot.version)
        for write in [*late_writes(), sink.mark_incomplete("a"), source.freeze("a")]:
            with pytest.raises(gyms_retired, match="rollout a of run default is retired") as caught:
                await write
            assert isinstance(caught.value, errors.TokenCaptureRetiredError)


@pytest.mark.parametrize(
    "name", ["TokenCaptureFrozenError", "TokenCaptureRetiredError", "RolloutRetiredError"]
)
def test_an_error_that_is_gyms_and_ours_can_be_caught_as_either_and_pickled(
    name: str, later_integration: ModuleType, peer_errors: dict[str, type[Exception]]
) -> None:
    joined = getattr(later_integration, name)
    assert issubclass(joined, getattr(errors, name))
    assert issubclass(joined, peer_errors[name])
    again = pickle.loads(pickle.dumps(joined("rollout a is frozen")))  # noqa: S301 - bytes made on this line
    assert type(again) is joined
    assert str(again) == "rollout a is frozen"


def imported_without(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delattr(gym_protocols, name, raising=False)
    monkeypatch.setattr(integrations, "nemo_gym", integration)
    monkeypatch.delitem(sys.modules, MODULE)
    return importlib.import_module(MODULE)


@pytest.mark.parametrize("name", ["TokenCaptureFrozenError", "TokenCaptureRetiredError"])
def test_without_gyms_error_the_one_raised_is_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(imported_without(name, monkeypatch), name) is getattr(errors, name)


def test_without_gyms_error_a_retired_manifest_raises_what_its_route_answers_with_its_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised = imported_without("RolloutRetiredError", monkeypatch).RolloutRetiredError
    assert issubclass(raised, errors.RolloutRetiredError)
    assert issubclass(raised, ValueError)


async def test_refusals_reach_a_snapshot_that_has_a_place_for_them(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class LaterSnapshot(TokenCaptureSnapshot):  # type: ignore[misc] - nemo-gym ships no type information
        refusals: tuple[Any, ...] = ()

    @dataclass(frozen=True)
    class LaterRefusal:
        model_call_id: str
        code: str | None

    monkeypatch.setattr(gym_capture, "TokenCaptureSnapshot", LaterSnapshot)
    monkeypatch.setattr(gym_protocols, "CallRefusal", LaterRefusal, raising=False)
    monkeypatch.setattr(integrations, "nemo_gym", integration)
    monkeypatch.delitem(sys.modules, MODULE)
    later = importlib.import_module(MODULE)
    async with later.SqlTokenSink(store_url) as sink, later.SqlTokenSource(store_url) as source:
        for call, code in (("call-1", "busy"), ("call-2", None)):
            await sink.begin_call("rollout-1", call)
            await sink.refuse_call("rollout-1", model_call_id=call, code=code)
        snapshot = await source.freeze("rollout-1")
    assert type(snapshot) is LaterSnapshot
    assert snapshot.refusals == (LaterRefusal("call-1", "busy"), LaterRefusal("call-2", None))


@pytest.mark.parametrize("absent", ["nemo_gym", "nemo_gym.token_id_capture"])
def test_importing_without_nemo_gym_says_what_to_install(absent: str) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None; import {MODULE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last_line = done.stderr.strip().splitlines()[-1]
    assert last_line.startswith(f"ImportError: {MODULE} needs nemo-gym")
    assert "pip install nemo-gym" in last_line
