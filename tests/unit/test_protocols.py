import inspect
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from tokencustody import protocols
from tokencustody.protocols import (
    CallRefusal,
    CaptureLedger,
    LineageMatch,
    LineageResolution,
    LineageResolver,
    TokenCaptureSnapshot,
    TokenSink,
    TokenSource,
)
from tokencustody.records import ParentResolutionStatus

pytestmark = pytest.mark.quick

SINK = {"put": "(entry)", "mark_incomplete": "(rollout_id, model_call_id='')", "close": "()"}
SOURCE = {
    "freeze": "(rollout_id)",
    "drop": "(rollout_id, snapshot_id, version)",
    "retire": "(rollout_ids)",
    "delete": "(rollout_ids)",
    "close": "()",
}
RESOLVER = {"resolve": "(rollout_id, request_items)", "is_process_shared": "()", "close": "()"}
LEDGER = {
    "record": "(commit)",
    "record_failure": "(rollout_id, model_call_id, reason)",
    "manifest": "(rollout_id)",
    "has_rows": "(rollout_id)",
    "retire": "(rollout_ids)",
    "delete": "(rollout_ids)",
}
INSTALLS = {"token_sink": SINK, "token_source": SOURCE, "lineage_store": RESOLVER}


def client_with(*methods: str) -> Any:
    async def method(self: object) -> None: ...

    return type("Client", (), dict.fromkeys(methods, method))()


def install(name: str) -> Callable[[Any], None]:
    return getattr(protocols, f"install_{name}")  # type: ignore[no-any-return]


def installed(name: str) -> Any:
    return getattr(protocols, f"installed_{name}")()


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    yield
    for name in INSTALLS:
        install(name)(None)


@pytest.mark.parametrize(
    ("protocol", "methods"),
    [(TokenSink, SINK), (TokenSource, SOURCE), (LineageResolver, RESOLVER), (CaptureLedger, LEDGER)],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_protocol_has_exactly_the_published_methods_and_parameters(
    protocol: type, methods: dict[str, str]
) -> None:
    found = {}
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
            found[name] = str(inspect.Signature(bare))
            assert inspect.iscoroutinefunction(member) == (name != "is_process_shared")
    assert found == methods


def test_a_ledger_is_a_lineage_resolver_too() -> None:
    assert issubclass(CaptureLedger, LineageResolver)


@pytest.mark.parametrize("name", INSTALLS)
def test_what_was_installed_is_found_until_it_is_replaced_or_cleared(name: str) -> None:
    assert installed(name) is None
    first, second = client_with(*INSTALLS[name]), client_with(*INSTALLS[name], "extra")
    install(name)(first)
    assert installed(name) is first
    install(name)(second)
    assert installed(name) is second
    install(name)(None)
    assert installed(name) is None


@pytest.mark.parametrize(
    ("name", "missing"), [(name, m) for name, methods in INSTALLS.items() for m in methods]
)
def test_a_client_that_lacks_a_method_is_refused_by_that_name_and_replaces_nothing(
    name: str, missing: str
) -> None:
    good = client_with(*INSTALLS[name])
    install(name)(good)
    bad = client_with(*(method for method in INSTALLS[name] if method != missing))
    with pytest.raises(TypeError, match=f"Client lacks {missing}$"):
        install(name)(bad)
    setattr(bad, missing, "not callable")
    with pytest.raises(TypeError, match=f"Client lacks {missing}$"):
        install(name)(bad)
    assert installed(name) is good


@pytest.mark.parametrize("name", INSTALLS)
def test_a_class_is_refused_where_an_instance_belongs(name: str) -> None:
    with pytest.raises(TypeError, match="must be an instance, not the class Client"):
        install(name)(type(client_with(*INSTALLS[name])))
    assert installed(name) is None


MATCH = LineageMatch("call", (1, 2), "digest")


def test_a_resolved_parent_without_a_match_cannot_be_expressed() -> None:
    with pytest.raises(ValueError, match="needs its match"):
        LineageResolution(ParentResolutionStatus.RESOLVED)


@pytest.mark.parametrize("status", [ParentResolutionStatus.ROOT, ParentResolutionStatus.UNRESOLVED])
def test_a_match_on_any_other_status_cannot_be_expressed(status: ParentResolutionStatus) -> None:
    with pytest.raises(ValueError, match=f"{status.value} cannot carry a match"):
        LineageResolution(status, MATCH)


def test_decisions_matches_and_snapshots_are_immutable_and_have_the_published_defaults() -> None:
    decision = LineageResolution(ParentResolutionStatus.RESOLVED, MATCH)
    snapshot = TokenCaptureSnapshot("rollout", (), False, "snapshot", 3)
    assert decision.reason == ""
    assert (MATCH.staging_chain, MATCH.prev_len, MATCH.chain_hash) == ((), 0, "")
    assert snapshot.refusals == ()
    for value, name in ((decision, "reason"), (MATCH, "digest"), (snapshot, "version")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, "other")


def test_a_refusal_is_a_pair_of_call_and_code() -> None:
    assert CallRefusal("call", "context_too_long") == ("call", "context_too_long")


def test_resolution_statuses_are_the_strings_of_the_wire() -> None:
    assert [status.value for status in ParentResolutionStatus] == ["root", "resolved", "unresolved"]
    assert ParentResolutionStatus("resolved") == "resolved"
