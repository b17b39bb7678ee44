"""Calls staged as arrays: the same digests, bytes and chains as of lists, and no list on the way."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.arrays import Untouchable, float_arrays, id_arrays, peak_below
from tests.support.staged import family
from tokencustody import SqlStagingStore
from tokencustody.codec.staged import pack_call, validated_call
from tokencustody.staging import (
    CaptureAdmission,
    CaptureError,
    CommitCoords,
    GenerationCutContinuation,
    RolloutTokenCapture,
    StagedCallRecord,
    StageResult,
    build_staging_delta,
    compute_chain_hash,
    compute_staging_digest,
    hash_token_ids,
)

COLUMNS = ("token_ids_delta", "token_mask_delta", "generation_log_probs_delta")
IDS = st.sampled_from((2**7, 2**16, 2**32, 2**64)).flatmap(
    lambda bound: st.lists(st.integers(0, bound - 1), max_size=4)
)
ROOT = CaptureAdmission(rollout_id="r", model_call_id="c1", mode="text")


class ListSink:
    """Keeps what was staged."""

    def __init__(self) -> None:
        self.staged: list[StagedCallRecord] = []

    def stage(self, record: StagedCallRecord, **_: Any) -> StageResult:
        self.staged.append(record)
        return StageResult(ok=True, staging_key=record.staging_key)


def captured(
    admission: CaptureAdmission, prefix: Any, prompt: Any, generated: Any, log_probs: Any
) -> tuple[CommitCoords, StagedCallRecord]:
    sink = ListSink()
    capture = RolloutTokenCapture(sink=sink, weight_version_fn=lambda: 5)
    call = capture.begin_call(admission, prefix_token_ids=prefix)
    coords = capture.complete_call(
        call, prompt_token_ids=prompt, generated_token_ids=generated, generated_logprobs=log_probs
    )
    return coords, *sink.staged


def child(prefix: list[int], **fields: Any) -> CaptureAdmission:
    return CaptureAdmission(
        rollout_id="r",
        model_call_id="c2",
        mode="token_in",
        parent_call_id="c1",
        parent_chain_hash="0f" * 32,
        prev_len=len(prefix),
        staging_chain=["r/c1"],
        **fields,
    )


@given(prefix=IDS, added=IDS, generated=IDS, data=st.data())
def test_a_call_captured_as_arrays_is_the_one_captured_as_lists(
    prefix: list[int], added: list[int], generated: list[int], data: st.DataObject
) -> None:
    generated, log_probs = [*generated, 3], [-0.25, *(-1.5 for _ in generated)]
    admission = child(prefix) if prefix else ROOT

    def any_form(column: list[Any], arrays: dict[str, Any]) -> Any:
        forms = arrays | {"list": column}
        return forms[data.draw(st.sampled_from(sorted(forms)))]

    lists = (prefix, [*prefix, *added], generated)
    expected = captured(admission, *lists, log_probs)
    given_ = [any_form(column, id_arrays(column)) for column in lists]
    coords, record = captured(admission, *given_, any_form(log_probs, float_arrays(log_probs)))
    assert (coords, record) == expected
    assert record.model_dump() == expected[1].model_dump()
    assert record.model_dump_json() == expected[1].model_dump_json()
    assert pack_call(validated_call(record)) == pack_call(expected[1])
    assert StagedCallRecord(**record.model_dump()) == record


def test_every_function_of_staging_takes_arrays() -> None:
    for call in family():
        lists = call.snapshot.model_dump(exclude={"extras"})
        for ids in id_arrays(lists["token_ids_delta"]).values():
            assert hash_token_ids(ids) == hash_token_ids(lists["token_ids_delta"])
            assert compute_chain_hash(None, ids) == compute_chain_hash(None, lists["token_ids_delta"])
        for columns in zip(*(float_arrays(lists[name]).values() for name in COLUMNS[1:]), strict=True):
            arrays = {
                **lists,
                **dict(zip(COLUMNS, (np.array(lists["token_ids_delta"]), *columns), strict=True)),
            }
            components = {name: value for name, value in arrays.items() if name != "digest"}
            assert compute_staging_digest(**components) == lists["digest"]
            assert type(call.snapshot)(**arrays, extras=call.snapshot.extras) == call.snapshot
            del (
                components["schema_version"],
                components["digest_version"],
                components["extras_digest_version"],
            )
            made = type(call.snapshot).from_components(**components, extras=call.snapshot.extras)
            assert made == call.snapshot
    cut = GenerationCutContinuation(
        source_model_call_id="c",
        source_capture_key="k",
        staging_keys=("r/c",),
        prefix_token_count=2,
        prefix_digest=hash_token_ids([1, 2]),
        effective_output_limit=1,
    )
    cut.check_prefix(np.array([1, 2]))
    with pytest.raises(ValueError, match="does not have its digest"):
        cut.check_prefix(np.array([1, 3]))


def test_a_delta_is_an_array_where_it_was_given_as_one() -> None:
    ids, mask, log_probs = build_staging_delta(
        prompt_token_ids=np.array([1, 2]),
        generated_token_ids=[3],
        generated_log_probs=[-0.5],
        prev_len=1,
    )
    assert (ids.tolist(), mask.tolist(), log_probs) == ([2, 3], [0.0, 1.0], [0.0, -0.5])


def test_the_inline_prefix_of_an_admission_may_be_an_array_and_nothing_without_an_order() -> None:
    ids = [1, 70_000]
    listed = child(ids, required_prefix_token_ids=ids)
    expected = captured(listed, None, [*ids, 3], [4], [-0.5])
    for column in id_arrays(ids).values():
        admission = child(ids, required_prefix_token_ids=column)
        assert admission == listed
        assert admission.model_dump_json() == listed.model_dump_json()
        assert captured(admission, None, [*ids, 3], [4], [-0.5]) == expected
    for wrong in ({1, 70_000}, bytes(2), ["x"] * 100_000, np.array(["x"] * 2)):
        with pytest.raises(ValueError, match="required_prefix_token_ids") as refused:
            child([1, 2], required_prefix_token_ids=wrong)
        assert len(str(refused.value)) < 400
        record = family()[0].snapshot.model_dump()
        with pytest.raises(ValueError, match="token_ids_delta") as refused:
            StagedCallRecord(**record | {"token_ids_delta": wrong})
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("prefix", "problem"),
    [
        (np.array([1, -1]), r"prefix_token_ids: every id must lie between 0 and 2\^64-1"),
        (np.zeros(2), "prefix_token_ids: the elements of an array must be integers"),
        (np.array([1]), "the prefix has 1 token ids"),
        (np.array([1, 3]), "prefix_token_ids are not the admission's inline prefix"),
        (b"\1\2", "prefix_token_ids: must be a list of plain numbers or an array of them, not bytes"),
    ],
)
def test_a_wrong_prefix_in_an_array_is_the_caller_s_error(prefix: Any, problem: str) -> None:
    capture = RolloutTokenCapture(sink=ListSink(), weight_version_fn=lambda: 5)
    with pytest.raises(CaptureError, match=problem):
        capture.begin_call(child([1, 2], required_prefix_token_ids=[1, 2]), prefix_token_ids=prefix)


@pytest.mark.parametrize(
    ("name", "column", "problem"),
    [
        ("prompt_token_ids", np.array([1, -1]), r"prompt_token_ids: every id must lie between 0 and 2\^64-1"),
        ("generated_token_ids", np.array([True]), "generated_token_ids: the elements of an array must be"),
        ("generated_logprobs", np.array([1], "f2"), "generated_log_probs: the elements of an array must be"),
        ("generated_logprobs", np.array([math.nan]), "every value must be finite as float32"),
        ("generated_logprobs", np.array([-1e39]), "every value must be finite as float32"),
    ],
)
def test_an_array_that_cannot_be_staged_fails_the_capture_and_is_named_in_the_log(
    name: str, column: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture = RolloutTokenCapture(sink=ListSink(), weight_version_fn=lambda: 5)
    columns = {"prompt_token_ids": [1], "generated_token_ids": [2], "generated_logprobs": [-0.5]}
    coords = capture.complete_call(capture.begin_call(ROOT), **(columns | {name: column}))
    assert coords.disposition == "capture_failed"
    assert re.search(problem, caplog.text)


@pytest.fixture
def staging(store_url: str) -> Iterator[SqlStagingStore]:
    """A staging store on a new database, once on SQLite and once on PostgreSQL."""
    with SqlStagingStore(store_url, run="run-1", writer="test-writer") as opened:
        yield opened


def test_a_call_staged_as_arrays_and_as_lists_is_staged_once(staging: SqlStagingStore) -> None:
    for call in family():
        lists = call.snapshot.model_dump()
        for ids, mask, log_probs in (
            (
                np.array(lists[COLUMNS[0]]),
                np.array(lists[COLUMNS[1]], "f4"),
                np.array(lists[COLUMNS[2]], ">f8"),
            ),
            (Untouchable(code, lists[name]) for code, name in zip("Qdd", COLUMNS, strict=True)),
        ):
            columns = dict(zip(COLUMNS, (ids, mask, log_probs), strict=True))
            assert staging.stage(StagedCallRecord(**(lists | columns))).ok
        assert staging.stage(StagedCallRecord(**lists)).ok
        (read,) = staging.fetch([call.snapshot.staging_key])
        assert {type(getattr(read, name)) for name in COLUMNS} == {list}
        assert read.model_dump() == {name: value for name, value in lists.items() if name != "extras"}


def test_a_worker_s_buffers_may_be_used_again_once_a_call_is_complete() -> None:
    ids, floats = [1, 70_000, 3], [-0.5, -1.0, -1.5]
    expected = captured(ROOT, None, ids, ids, floats)
    components = expected[1].model_dump()
    for buffer in id_arrays(ids).values():
        found = captured(ROOT, None, buffer, buffer, floats)
        call = RolloutTokenCapture(sink=ListSink(), weight_version_fn=lambda: 5).begin_call(
            child(ids), prefix_token_ids=buffer
        )
        record = StagedCallRecord(**components | {"token_ids_delta": (delta := array("I", ids * 2))})
        for place in range(3):
            buffer[place] = delta[place] = 9
        assert found == expected
        assert list(call.prefix_token_ids) == ids
        assert record == expected[1]
    for buffer in float_arrays(floats).values():
        found = captured(ROOT, None, ids, ids, buffer)
        for place in range(3):
            buffer[place] = 9
        assert found == expected
    mask, log_probs = (array("d", components[name]) for name in COLUMNS[1:])
    record = StagedCallRecord(**components | {COLUMNS[1]: mask, COLUMNS[2]: log_probs})
    mask[0], log_probs[0] = 1.0, -9.0
    assert record == expected[1]


def test_a_long_call_is_staged_without_a_list(staging: SqlStagingStore) -> None:
    assert staging.stage(family()[0].snapshot).ok  # whatever the first call imports
    ids = np.arange(2_000_000, dtype="u4") + 80_000
    capture = RolloutTokenCapture(sink=staging, weight_version_fn=lambda: 5)
    call = capture.begin_call(child(ids[:1_000_000]), prefix_token_ids=ids[:1_000_000])
    # Encoded for the hashes an id takes 8 bytes, several times; each list of them would take 36 more.
    with peak_below(2_000_000 * 56):
        coords = capture.complete_call(
            call, prompt_token_ids=ids, generated_token_ids=ids[:1000], generated_logprobs=np.zeros(1000)
        )
    assert coords.disposition == "staged"
