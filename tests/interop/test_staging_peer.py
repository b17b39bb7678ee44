"""Differential tests of worker staging against the installed nemo_gym package: same input, same bytes, same verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nemo_gym.token_id_capture import staging as peer
from nemo_gym.token_id_capture.staging import records as peer_records

from tokencustody import staging
from tokencustody.staging import reasons, records

REFUSED = "refused"
# What the references have on top of the release.
LATER_FIELDS = {"capture_key", "generation_cut"}
MODELS = sorted(
    name
    for name, model in vars(peer_records).items()
    if isinstance(model, type)
    and hasattr(model, "model_fields")
    and model.__module__ == peer_records.__name__
    if not name.startswith("_")
)


def mostly(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    # Neither end of the range, which are drawn more often than the rest.
    return st.integers(0, 19).flatmap(lambda roll: bad if roll == 7 else good)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
identifier = mostly(st.sampled_from(["r", "c1", "c2", "é/ü"]), text)
odd = st.sampled_from([None, True, False, -1, 2**63, 2**64, 1.0, 0.5, -0.0, "1", "", b"b", [], {}, [None]])
length = st.integers(0, 4)
digest = mostly(
    st.sampled_from(["0f" * 32, "ab" * 32]), st.sampled_from(["AB" * 32, "ab", "", "ab" * 32 + "\n"])
)
token = st.integers(0, 3) | st.sampled_from([2**63, 2**64 - 1])
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
number = st.sampled_from(
    [0.0, -0.0, 1.0, -0.5, -1e-46, -3.4028235e38, -1e39, float("nan"), float("-inf"), 0, True]
)
extra = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats()
    | text
    | st.just((1,))
    | st.just(b"b"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=5,
)


def verdict(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except (ValueError, TypeError):
        return REFUSED


def dumped(model: Any) -> Any:
    """Return a model's wire form without the fields that the release does not know."""
    if isinstance(model, dict):
        return {
            name: dumped(value)
            for name, value in model.items()
            if name not in LATER_FIELDS or value is not None
        }
    return [dumped(item) for item in model] if isinstance(model, list) else model


@settings(max_examples=200)
@given(ids=st.lists(mostly(token, odd), max_size=8), parent=st.none() | digest)
def test_token_encodings_and_hashes_agree(ids: list[Any], parent: str | None) -> None:
    assert verdict(lambda: staging.encode_token_ids(ids)) == verdict(lambda: peer.encode_token_ids(ids))
    assert verdict(lambda: staging.hash_token_ids(ids)) == verdict(lambda: peer.hash_token_ids(ids))
    theirs = verdict(lambda: peer.compute_chain_hash(parent, ids))
    assert verdict(lambda: staging.compute_chain_hash(parent, ids)) == theirs


@settings(max_examples=300)
@given(extras=st.none() | st.dictionaries(text | st.integers(), extra, max_size=3) | extra)
def test_extras_digests_agree(extras: Any) -> None:
    theirs = verdict(lambda: peer.compute_extras_digest(extras))
    assert verdict(lambda: staging.compute_extras_digest(extras)) == theirs


@settings(max_examples=300)
@given(
    prompt=st.lists(token, max_size=5),
    generation=st.lists(st.tuples(token, float32), max_size=3),
    surplus=mostly(st.just([]), st.lists(float32, max_size=1)),
    prev_len=mostly(length, st.integers(-1, 6)),
)
def test_deltas_agree(
    prompt: list[int], generation: list[tuple[int, float]], surplus: list[float], prev_len: int
) -> None:
    parts: dict[str, Any] = {
        "prompt_token_ids": prompt,
        "generated_token_ids": [token for token, _ in generation],
        "generated_log_probs": [log_prob for _, log_prob in generation] + surplus,
        "prev_len": prev_len,
    }
    theirs = verdict(lambda: peer.build_staging_delta(**parts))
    assert verdict(lambda: staging.build_staging_delta(**parts)) == theirs


@st.composite
def staged_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields of a staged call that are mostly right."""
    prev_len = draw(st.sampled_from([0, 0, 3]))
    columns = draw(st.lists(st.tuples(token, st.booleans(), mostly(float32, number)), min_size=1, max_size=4))
    fields: dict[str, Any] = {
        "schema_version": 2,
        "digest_version": 2,
        "extras_digest_version": 1,
        "rollout_id": draw(identifier),
        "model_call_id": draw(identifier),
        "parent_call_id": draw(identifier) if prev_len else None,
        "mode": "token_in" if prev_len else "text",
        "prev_len": prev_len,
        "delta_len": len(columns),
        "cum_len": prev_len + len(columns),
        "weight_version": draw(length),
        "token_ids_delta": [token for token, _, _ in columns],
        "token_mask_delta": [1.0 if sampled else 0.0 for _, sampled, _ in columns],
        "generation_log_probs_delta": [log_prob if sampled else 0.0 for _, sampled, log_prob in columns],
        "extras_digest": draw(st.just(peer.EMPTY_EXTRAS_DIGEST) | digest),
        "chain_hash": draw(digest),
        "cumulative_hash": draw(digest),
    }
    for name in draw(mostly(st.just([]), st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2))):
        fields[name] = draw(
            odd | length | st.lists(number, max_size=4) | st.sampled_from(["text", "token_in"])
        )
    # To the peer bytes are a list of small ids; here they are no list.
    assume(not isinstance(fields["token_ids_delta"], bytes))
    return fields


@settings(max_examples=400)
@given(fields=staged_fields())
def test_staged_call_digests_agree(fields: dict[str, Any]) -> None:
    theirs = verdict(lambda: peer.compute_staging_digest(**fields))
    assert verdict(lambda: staging.compute_staging_digest(**fields)) == theirs


@settings(max_examples=300)
@given(fields=staged_fields(), extras=mostly(st.none(), st.dictionaries(text, extra, max_size=2)))
def test_a_staged_call_of_one_validates_in_the_other(fields: dict[str, Any], extras: Any) -> None:
    if extras is not None:
        fields["extras_digest"] = verdict(lambda: peer.compute_extras_digest(extras))
    computed = verdict(lambda: peer.compute_staging_digest(**fields))
    payload = fields | {"extras": extras, "digest": computed if computed != REFUSED else "0" * 64}
    theirs = verdict(lambda: peer.StagedCallRecord(**payload))
    ours = verdict(lambda: staging.StagedCallRecord(**payload))
    if theirs is REFUSED or ours is REFUSED:
        assert theirs is ours
        return
    assert ours.staging_key == theirs.staging_key
    for snapshot in ("StagedCallRecord", "StagedCallSnapshot"):
        assert getattr(peer, snapshot)(**ours.model_dump()).model_dump() == ours.model_dump()
        assert getattr(staging, snapshot)(**theirs.model_dump()).model_dump() == theirs.model_dump()
    base = theirs.model_dump(exclude={"extras"})
    assert staging.StagedCallBaseSnapshot(**base).model_dump() == base


row = st.fixed_dictionaries(
    {
        "model_call_id": identifier,
        "prev_len": length,
        "delta_len": length,
        "weight_version": length,
        "digest": digest,
        "extras_digest": digest,
        "staging_key": identifier,
        "chain_hash": digest,
        "cumulative_hash": digest,
        "response_id": identifier,
    },
    optional={
        "cum_len": length,
        "mode": st.sampled_from(["text", "token_in", "other"]),
        "parent_call_id": st.none() | identifier,
        "admitted_at": st.none() | number,
        "output_fingerprint": st.none() | digest,
        "continuation_fingerprint": st.none() | digest,
        "fingerprint_version": length,
    },
)


@st.composite
def consistent_row(draw: st.DrawFn, call_id: str) -> dict[str, Any]:
    prev_len = draw(st.sampled_from([0, 2]))
    return {
        **dict.fromkeys(("digest", "extras_digest", "chain_hash", "cumulative_hash"), "0f" * 32),
        "model_call_id": call_id,
        "parent_call_id": draw(st.sampled_from(["c1", "c2"])) if prev_len else None,
        "mode": "token_in" if prev_len else "text",
        "prev_len": prev_len,
        "delta_len": 2,
        "cum_len": prev_len + 2,
        "weight_version": draw(length),
        "staging_key": f"r/{call_id}",
        "response_id": f"response-{call_id}",
        "admitted_at": draw(st.none() | st.integers(0, 9) | st.floats(0, 9)),
    }


@st.composite
def consistent_admission(draw: st.DrawFn) -> dict[str, Any]:
    admission: dict[str, Any] = {"rollout_id": "r", "model_call_id": "c2", "mode": "text"}
    prefix = draw(st.lists(token, max_size=3))
    if prefix:
        admission |= {"mode": "token_in", "parent_call_id": "c1", "parent_chain_hash": "0f" * 32}
        admission |= {"prev_len": len(prefix)}
        admission |= draw(
            st.sampled_from([{"required_prefix_token_ids": prefix}, {"staging_chain": ["r/c0", "r/c1"]}])
        )
    return admission


@st.composite
def consistent_coords(draw: st.DrawFn) -> dict[str, Any]:
    coords = draw(consistent_row("c1"))
    for name in ("mode", "response_id", "admitted_at"):
        del coords[name]
    if draw(st.booleans()):
        coords |= {"disposition": "capture_failed", "delta_len": 0, "cum_len": coords["prev_len"]}
        for name in ("digest", "extras_digest", "staging_key", "chain_hash", "cumulative_hash"):
            del coords[name]
    return coords | {"rollout_id": "r"}


@st.composite
def consistent_receipt(draw: st.DrawFn) -> dict[str, Any]:
    poisoned = draw(st.booleans())
    chosen = not poisoned or draw(st.booleans())
    return {
        "rollout_id": "r",
        "manifest": [draw(consistent_row(call)) for call in ("c1", "c2")],
        "reward": draw(st.none() | float32),
        "capture_poisoned": poisoned,
        "failure_reason": draw(text) if poisoned else None,
        "terminal_selection": draw(st.sampled_from(["declared", "content"])) if chosen else None,
        "terminal_model_call_id": draw(st.sampled_from(["c1", "c2"])) if chosen else None,
    }


rows = st.lists(st.sampled_from(["c1", "c2", "c3"]).flatmap(consistent_row), max_size=3)
items = st.lists(st.dictionaries(text, text, max_size=2), max_size=2)
PAYLOADS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "CallRecord": row | consistent_row("c1"),
    "CaptureAdmission": consistent_admission()
    | st.fixed_dictionaries(
        {
            "rollout_id": identifier,
            "model_call_id": identifier,
            "mode": st.sampled_from(["text", "token_in"]),
        },
        optional={
            "parent_call_id": st.none() | identifier,
            "prev_len": length,
            "required_prefix_token_ids": st.lists(mostly(token, odd), max_size=4),
            "staging_chain": st.lists(text, max_size=2),
            "parent_chain_hash": st.none() | digest,
        },
    ),
    "CaptureLedgerCommit": st.fixed_dictionaries(
        {
            "rollout_id": identifier,
            "record": consistent_row("c1") | row,
            "request_items": items,
            "response_items": items,
        },
        optional={"staging_chain": st.lists(identifier, max_size=2)},
    ),
    "CommitCoords": consistent_coords()
    | st.fixed_dictionaries(
        {
            "rollout_id": identifier,
            "model_call_id": identifier,
            "prev_len": length,
            "delta_len": length,
            "cum_len": length,
            "weight_version": length,
        },
        optional={
            "parent_call_id": st.none() | identifier,
            "disposition": st.sampled_from(["staged", "capture_failed", "lost"]),
            **dict.fromkeys(("digest", "extras_digest", "chain_hash", "cumulative_hash"), st.none() | digest),
            "staging_key": st.none() | identifier,
        },
    ),
    "ManifestFailure": st.fixed_dictionaries({"model_call_id": identifier, "reason": identifier}),
    "RolloutManifest": st.fixed_dictionaries({"rollout_id": identifier}, optional={"records": rows}),
    "RolloutReceipt": consistent_receipt()
    | st.fixed_dictionaries(
        {"rollout_id": st.just("r")},
        optional={
            "manifest": rows,
            "reward": st.none() | number,
            "terminal_model_call_id": st.none() | st.sampled_from(["c1", "c2", ""]),
            "capture_poisoned": st.booleans(),
            "failure_reason": st.none() | text,
            "terminal_selection": st.sampled_from(
                [None, "declared", "response_id", "content", "heuristic", "x"]
            ),
            "terminal_attribution_reason": st.none() | text,
        },
    ),
    "StageResult": st.fixed_dictionaries(
        {"ok": mostly(st.booleans(), st.sampled_from([0, 1, "yes", 2, None]))},
        optional={"staging_key": st.none() | identifier, "error": st.none() | text},
    ),
}


def test_every_wire_model_of_the_peer_is_compared() -> None:
    staged = {"StagedCallBaseSnapshot", "StagedCallRecord", "StagedCallSnapshot"}
    assert set(MODELS) == PAYLOADS.keys() | staged


@pytest.mark.parametrize("name", MODELS)
def test_the_fields_of_a_wire_model_are_the_peer_s_in_its_order(name: str) -> None:
    theirs, ours = getattr(peer_records, name).model_fields, getattr(records, name).model_fields
    assert [field for field in ours if field not in LATER_FIELDS] == list(theirs)
    for field, info in theirs.items():
        default, own = (
            info.get_default(call_default_factory=True),
            ours[field].get_default(call_default_factory=True),
        )
        assert (own, ours[field].is_required()) == (default, info.is_required()), field


@pytest.mark.parametrize("name", sorted(PAYLOADS))
@settings(max_examples=250)
@given(data=st.data())
def test_a_wire_model_accepts_what_the_peer_accepts(name: str, data: st.DataObject) -> None:
    payload = data.draw(PAYLOADS[name])
    changed = st.lists(st.sampled_from(["schema_version", "x", *payload]), min_size=1, max_size=2)
    for field in data.draw(mostly(st.just([]), changed) | mostly(st.just([]), changed) | changed):
        payload[field] = data.draw(odd | length | identifier)
    theirs = verdict(lambda: getattr(peer_records, name)(**payload).model_dump())
    ours = verdict(lambda: dumped(getattr(records, name)(**payload).model_dump()))
    assert ours == theirs


class Sink:
    """Keeps records and answers in the types of one implementation."""

    def __init__(self, implementation: Any, answer: str) -> None:
        self.records: list[Any] = []
        self.implementation = implementation
        self.answer = answer

    def stage(self, record: Any) -> Any:
        self.records.append(record)
        match self.answer:
            case "staged":
                return self.implementation.StageResult(ok=True, staging_key=record.staging_key)
            case "refused":
                return self.implementation.StageResult(ok=False, error="full")
            case "raises":
                raise OSError("gone")
        return None


@pytest.mark.parametrize("answer", ["staged", "refused"])
def test_our_capture_takes_the_answer_of_a_sink_of_the_peer(
    answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink(peer, answer)
    capture = staging.RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 1)
    call = capture.begin_call(staging.CaptureAdmission(rollout_id="r", model_call_id="c", mode="text"))
    coords = capture.complete_call(
        call, prompt_token_ids=[1], generated_token_ids=[2], generated_logprobs=[-0.5]
    )
    if answer == "staged":
        assert (coords.disposition, coords.staging_key) == ("staged", "r/c")
        assert not caplog.messages
    else:
        assert (coords.disposition, coords.staging_key) == ("capture_failed", None)
        assert caplog.messages == ["rollout r, model call c: the sink refused the record: full"]


@settings(max_examples=300)
@given(
    prefix=st.lists(token, max_size=3),
    rest=st.lists(mostly(token, odd), max_size=3),
    generation=st.lists(st.tuples(mostly(token, odd), mostly(float32, number)), max_size=3),
    extras=st.none() | st.dictionaries(text, extra, max_size=2),
    inline=st.booleans(),
    weight_version=mostly(st.integers(0, 9), odd),
    answer=mostly(st.just("staged"), st.sampled_from(["refused", "raises", "nothing"])),
    prompt_change=mostly(st.just("none"), st.sampled_from(["shorten", "other"])),
)
def test_captures_give_equal_coordinates_and_records(
    prefix: list[int],
    rest: list[Any],
    generation: list[tuple[Any, Any]],
    extras: dict[str, Any] | None,
    inline: bool,
    weight_version: Any,
    answer: str,
    prompt_change: str,
) -> None:
    prompt = {"none": prefix, "shorten": prefix[:-1], "other": [9, *prefix[1:]]}[prompt_change] + rest
    admission: dict[str, Any] = {"rollout_id": "r", "model_call_id": "c", "mode": "text"}
    if prefix:
        admission |= {"mode": "token_in", "parent_call_id": "p", "parent_chain_hash": "0f" * 32}
        admission |= {"prev_len": len(prefix)}
        admission |= {"required_prefix_token_ids": prefix} if inline else {"staging_chain": ["r/p"]}

    def run(implementation: Any) -> Any:
        sink = Sink(implementation, answer)
        capture = implementation.RolloutTokenCapture(sink=sink, weight_version_fn=lambda: weight_version)
        try:
            call = capture.begin_call(
                implementation.CaptureAdmission(**admission),
                prefix_token_ids=None if inline or not prefix else list(prefix),
            )
        except implementation.CaptureError:
            return "caller error"
        coords = capture.complete_call(
            call,
            prompt_token_ids=prompt,
            generated_token_ids=[token for token, _ in generation],
            generated_logprobs=[log_prob for _, log_prob in generation],
            extras=extras,
        )
        return coords.model_dump(), [record.model_dump() for record in sink.records]

    assert run(staging) == run(peer)


def test_the_peer_s_golden_vectors_hold_here_and_ours_there() -> None:
    golden = peer.load_golden_vectors()
    assert staging.compute_extras_digest(golden["extras"]) == golden["extras_digest"]
    assert staging.compute_staging_digest(**golden["staged_call"]) == golden["staged_call_digest"]
    own = staging.load_golden_vectors()
    for vector in own["token_ids"]:
        assert peer.encode_token_ids(vector["token_ids"]).hex() == vector["encoding"]
        assert peer.hash_token_ids(vector["token_ids"]) == vector["hash"]
    for vector in own["chain_hashes"]:
        chain_hash = peer.compute_chain_hash(vector["parent_chain_hash"], vector["token_ids_delta"])
        assert chain_hash == vector["chain_hash"]
    for vector in own["extras"]:
        assert peer.compute_extras_digest(vector["extras"]) == vector["digest"]
    for vector in own["staged_calls"]:
        assert peer.compute_staging_digest(**vector["fields"]) == vector["digest"]


def test_the_constants_of_the_wire_are_the_peer_s() -> None:
    for name in (
        "STAGING_SCHEMA_VERSION",
        "STAGING_DIGEST_VERSION",
        "EXTRAS_DIGEST_VERSION",
        "EMPTY_EXTRAS_DIGEST",
    ):
        assert getattr(staging, name) == getattr(peer, name)
    for name, value in vars(peer_records).items():
        if name.endswith("_REASON") or name.startswith("TERMINAL_"):
            assert getattr(reasons, name) == value


def test_the_package_exports_what_the_peer_s_does() -> None:
    # Attribution by a response is done by `assemble_receipt` here; the references name no function for it.
    assert set(peer.__all__) - set(staging.__all__) == {"resolve_terminal"}
