"""Several answers to one prompt: only the one is trained that the agent is proven to have received."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.export.exports import RUN, left_out, listed, parquet_rows, put_linear, put_rollout
from tests.support.entries import make_entry
from tokencustody import TokenEntry, open_store
from tokencustody.errors import PayloadConflictError
from tokencustody.export import ExportOptions, OnBreak, Siblings, export

P = [1, 2]


def call(
    name: str, prompt: Sequence[int], generation: Sequence[int], parent: str | None = None
) -> TokenEntry:
    return make_entry(
        model_call_id=name, prompt=list(prompt), generation=list(generation), parent=parent, text=name
    )


def asked(
    request: str, name: str, prompt: Sequence[int], generation: Sequence[int], parent: str | None = None
) -> TokenEntry:
    """Return a call that is stamped with a request, whatever its prompt."""
    return make_entry(
        model_call_id=name,
        prompt=list(prompt),
        generation=list(generation),
        parent=parent,
        text=name,
        request=[{"role": "user", "content": request}] if request else [],
    )


def not_stamped(entry: TokenEntry) -> TokenEntry:
    return entry.model_copy(update={"continuation_context_digest": "", "continuation_fingerprint": ""})


def of_unknown_parent(entry: TokenEntry) -> TokenEntry:
    return entry.model_copy(update={"parent_resolution": "unresolved", "parent_call_id": None})


def unstamped(name: str, prompt: Sequence[int], generation: Sequence[int]) -> TokenEntry:
    return call(name, prompt, generation).model_copy(update={"parent_resolution": None})


def unresolved(name: str, prompt: Sequence[int], generation: Sequence[int]) -> TokenEntry:
    return call(name, prompt, generation).model_copy(update={"parent_resolution": "unresolved"})


def delta(
    name: str, whole: Sequence[int], suffix: Sequence[int], generation: Sequence[int], parent: str
) -> Any:
    return make_entry(
        model_call_id=name,
        prompt=list(suffix),
        generation=list(generation),
        parent=parent,
        prompt_is_delta=True,
        cumulative=[*whole, *generation],
        text=name,
    )


async def trained(
    url: str, out: Path, entries: Sequence[TokenEntry], **options: Any
) -> tuple[list[list[str]], dict[str, str]]:
    """Return the calls of each row, and why other calls are left out. Each row trains all that it has."""
    await put_rollout(url, entries)
    report = await export(url, out, ExportOptions(**options))
    if report.all_left_out:
        return [], {name: reason for _, name, reason in listed(report)}
    rows = parquet_rows(out)
    assert sum(sum(row["loss_mask"]) for row in rows) == report.trained_tokens
    return [row["call_ids"] for row in rows], {name: reason for _, name, reason in left_out(out)}


AMBIGUOUS, SUPERSEDED, SILENT = "ambiguous_retry", "superseded_retry", "no_generated_tokens"

CASES: dict[str, tuple[list[TokenEntry], list[list[str]], dict[str, str]]] = {
    "the first of two roots was lost": (
        [call("a", P, [30, 31]), call("b", P, [3]), call("c", [*P, 3, 4], [5], "b")],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
    "the second of two roots came too late": (
        [call("a", P, [3]), call("b", P, [30]), call("c", [*P, 3, 4], [5], "a")],
        [["a", "c"]],
        {"b": SUPERSEDED},
    ),
    "the last call, twice": (
        [call("a", P, [3]), call("b", [*P, 3, 4], [50], "a"), call("c", [*P, 3, 4], [5], "a")],
        [["a"]],
        {"b": AMBIGUOUS, "c": AMBIGUOUS},
    ),
    "the only call, twice": ([call("a", P, [3]), call("b", P, [4])], [], {"a": AMBIGUOUS, "b": AMBIGUOUS}),
    "both went on": (
        [
            call("a", P, [3]),
            call("b", P, [4]),
            call("c", [*P, 3, 9], [5], "a"),
            call("d", [*P, 4, 9], [6], "b"),
            call("e", [*P, 4, 9, 6, 7], [8], "d"),
        ],
        [],
        {
            "a": AMBIGUOUS,
            "b": AMBIGUOUS,
            "c": "parent_left_out",
            "d": "parent_left_out",
            "e": "parent_left_out",
        },
    ),
    "three tries, and three again below": (
        [
            call("a1", P, [10]),
            call("a2", P, [11]),
            call("a3", P, [12]),
            call("b1", [*P, 12, 4], [20], "a3"),
            call("b2", [*P, 12, 4], [21], "a3"),
            call("b3", [*P, 12, 4], [22], "a3"),
            call("c", [*P, 12, 4, 21, 5], [30], "b2"),
        ],
        [["a3", "b2", "c"]],
        dict.fromkeys(("a1", "a2", "b1", "b3"), SUPERSEDED),
    ),
    "the retry that went on was itself asked twice at its end": (
        [
            call("a", P, [10]),
            call("b", P, [11]),
            call("c", [*P, 11, 4], [20], "b"),
            call("d", [*P, 11, 4], [21], "b"),
        ],
        [["b"]],
        {"a": SUPERSEDED, "c": AMBIGUOUS, "d": AMBIGUOUS},
    ),
    "what went on had been tokenised again": (
        [call("a", P, [10, 11]), call("b", P, [12]), call("c", [*P, 99], [5], "a")],
        [["a"], ["c"]],
        {"b": SUPERSEDED},
    ),
    "the same tokens twice, and then on": (
        [call("b", P, [3]), call("a", P, [3]), call("c", [*P, 3, 4], [5], "b")],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
    "the same tokens twice at the end": (
        [call("b", P, [3]), call("a", P, [3])],
        [["a"]],
        {"b": SUPERSEDED},
    ),
    "the same tokens twice, and both named as the parent": (
        [
            call("a", P, [3]),
            call("b", P, [3]),
            call("c", [*P, 3, 4], [5], "a"),
            call("d", [*P, 3, 4], [6], "b"),
            call("e", [*P, 3, 4, 6, 7], [8], "d"),
        ],
        [["a", "d", "e"]],
        {"b": SUPERSEDED, "c": SUPERSEDED},
    ),
    "one that was cut off, then one that answered": (
        [call("a", P, []), call("b", P, [3])],
        [["b"]],
        {"a": SILENT},
    ),
    "one that answered, then one that was cut off": (
        [call("b", P, [3]), call("c", P, [])],
        [["b"]],
        {"c": SILENT},
    ),
    "an answer of nothing that the agent went on from": (
        [call("a", P, [3]), call("b", P, []), call("c", [*P, 4], [5], "b")],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
    "an end of text alone, then an answer": (
        [call("a", P, [9]), call("b", P, [3])],
        [],
        {"a": AMBIGUOUS, "b": AMBIGUOUS},
    ),
    "two prompts of one length": ([call("a", [1, 2], [3]), call("b", [1, 4], [3])], [["a"], ["b"]], {}),
    "one prompt of two requests in two branches that differ": (
        [
            call("r", P, [3]),
            call("s", [*P, 3], [4], "r"),
            call("b", [*P, 3, 4, 5], [6], "r"),
            call("c", [*P, 3, 4, 5], [7], "s"),
        ],
        [["r", "b"], ["r", "s", "c"]],
        {},
    ),
    "without a recorded parent": (
        [unstamped("a", P, [3]), unstamped("b", P, [4]), unstamped("c", [*P, 4, 5], [6])],
        [["c"]],
        {"a": AMBIGUOUS, "b": AMBIGUOUS},
    ),
    "without a recorded parent, and one went on": (
        [unstamped("a", P, [3]), unstamped("b", P, [4]), call("c", [*P, 4, 5], [6], "b")],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
    "a retry whose own parent is not known": (
        [
            call("a", P, [3]),
            call("b", [*P, 3, 4], [5], "a"),
            unresolved("c", [*P, 3, 4], [6]),
            call("d", [*P, 3, 4, 5, 7], [8], "b"),
        ],
        [["a", "b", "d"]],
        {"c": SUPERSEDED},
    ),
    "an unknown parent beside an empty answer that was asked again": (
        [
            call("a", P, [3]),
            call("b", [*P, 3, 4], [], "a"),
            call("c", [*P, 3, 4], [5], "b"),
            unresolved("d", [*P, 3, 4], [6]),
        ],
        [["a", "b"]],
        {"c": AMBIGUOUS, "d": AMBIGUOUS},
    ),
    "one that names itself, which continues nothing": (
        [call("a", P, [3]), call("b", [*P, 3], [4], "b"), unresolved("c", [*P, 3], [5])],
        [["a"]],
        {"b": AMBIGUOUS, "c": AMBIGUOUS},
    ),
    "one as a delta, one in full": (
        [
            call("a", P, [3]),
            delta("b", [*P, 3, 4], [4], [5], "a"),
            call("c", [*P, 3, 4], [6], "a"),
            delta("d", [*P, 3, 4, 6, 7], [7], [8], "c"),
        ],
        [["a", "c", "d"]],
        {"b": SUPERSEDED},
    ),
    "one request, and a clock in the prompt": (
        [asked("q", "a", [1, 100], [3]), asked("q", "b", [1, 101], [4]), call("c", [1, 101, 4, 5], [6], "b")],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
    "one request, a clock, and the first was received": (
        [asked("q", "a", [1, 100], [3]), asked("q", "b", [1, 101], [4]), call("c", [1, 100, 3, 5], [6], "a")],
        [["a", "c"]],
        {"b": SUPERSEDED},
    ),
    "one request and a clock at the end, even if the answers are the same": (
        [asked("q", "a", [1, 100], [3]), asked("q", "b", [1, 101], [3])],
        [],
        {"a": AMBIGUOUS, "b": AMBIGUOUS},
    ),
    "one request and a clock, and both went on": (
        [
            asked("q", "a", [1, 100], [3]),
            asked("q", "b", [1, 101], [3]),
            call("c", [1, 100, 3, 5], [6], "a"),
            call("d", [1, 101, 3, 5], [7], "b"),
        ],
        [],
        {"a": AMBIGUOUS, "b": AMBIGUOUS, "c": "parent_left_out", "d": "parent_left_out"},
    ),
    "one request, tokenised again where its parent is not known any more": (
        [
            call("a", P, [10, 11]),
            asked("q", "b", [*P, 10, 11, 4], [20], "a"),
            of_unknown_parent(asked("q", "c", [*P, 99, 4], [21])),
            call("d", [*P, 99, 4, 21, 5], [30], "c"),
        ],
        [["a"], ["c", "d"]],
        {"b": SUPERSEDED},
    ),
    "one request, resolved to two answers of one text": (
        [
            call("r", P, [3]),
            call("s", [*P, 9], [4]),
            asked("q", "b", [*P, 3, 5], [6], "r"),
            asked("q", "c", [*P, 9, 4, 5], [7], "s"),
            call("d", [*P, 9, 4, 5, 7, 8], [11], "c"),
        ],
        [["r"], ["s", "c", "d"]],
        {"b": SUPERSEDED},
    ),
    "one that shares its prompt with one and its request with another": (
        [
            not_stamped(call("a", P, [3])),
            asked("q", "b", P, [4]),
            asked("q", "c", [1, 101], [5]),
            call("d", [1, 101, 5, 6], [7], "c"),
        ],
        [["c", "d"]],
        {"a": SUPERSEDED, "b": SUPERSEDED},
    ),
    "calls without the stamp of a request, and with an empty one": (
        [
            not_stamped(asked("q", "a", [1, 100], [3])),
            not_stamped(asked("q", "b", [1, 101], [4])),
            asked("", "c", [1, 102], [5]),
            asked("", "d", [1, 103], [6]),
        ],
        [["a"], ["b"], ["c"], ["d"]],
        {},
    ),
    "an empty answer that was asked again with the clock gone on": (
        [
            asked("q", "a", [1, 100], []),
            asked("q", "b", [1, 101], [4], "a"),
            asked("q", "c", [1, 102], [5], "a"),
            call("d", [1, 102, 5, 6], [7], "c"),
        ],
        [["c", "d"]],
        {"a": SILENT, "b": SUPERSEDED},
    ),
    "an answer without a text that was asked again is not continued by that": (
        [asked("q", "a", [1, 100], [9]), asked("q", "b", [1, 101], [4], "a")],
        [],
        {"a": AMBIGUOUS, "b": AMBIGUOUS},
    ),
    "the same prompt and tokens below one another are one answer, and no circle": (
        [
            asked("q", "b", P, [3]),
            asked("q", "a", P, [3], "b"),
            call("c", [*P, 3, 4], [5], "a"),
        ],
        [["b", "c"]],
        {"a": SUPERSEDED},
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_of_several_answers_to_one_prompt_only_the_one_that_was_received_is_trained(
    store_url: str, tmp_path: Path, case: str
) -> None:
    entries, rows, reasons = CASES[case]
    assert await trained(store_url, tmp_path / "out", entries) == (rows, reasons)


async def test_the_shared_beginning_is_trained_in_the_chain_that_was_received(
    store_url: str, tmp_path: Path
) -> None:
    entries = [
        call("a", P, [3]),
        call("lost", [*P, 3, 4], [50], "a"),
        call("b", [*P, 3, 4], [5], "a"),
        call("c", [*P, 3, 4, 5, 6], [7], "b"),
    ]
    await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    assert (row["token_ids"], row["loss_mask"]) == ([*P, 3, 4, 5, 6, 7], [0, 0, 1, 0, 1, 0, 1])
    # The agent lost nothing by it; and the answer that it never received is in no file.
    assert (row["whole"], row["calls_left_out"], row["segments"]) == (True, 1, 1)


@pytest.mark.parametrize("case", ["the last call, twice", "both went on", "the first of two roots was lost"])
async def test_siblings_that_were_asked_for_are_all_trained_if_that_is_said(
    store_url: str, tmp_path: Path, case: str
) -> None:
    entries, _, _ = CASES[case]
    rows, reasons = await trained(store_url, tmp_path / "out", entries, siblings=Siblings.KEEP)
    assert {name for row in rows for name in row} == {entry.model_call_id for entry in entries}
    assert reasons == {}


async def test_a_conflicting_answer_is_never_the_one_and_still_leaves_doubt(
    store_url: str, tmp_path: Path
) -> None:
    for name, went_on, rows, why_b in (
        ("left", "b", [["b", "c"]], None),
        ("doubt", None, [], AMBIGUOUS),
        ("wrong", "a", [["c"]], SUPERSEDED),
    ):
        entries = [call("a", P, [3]), call("b", P, [4])]
        if went_on is not None:
            answer = 3 if went_on == "a" else 4
            entries.append(call("c", [*P, answer, 5], [6], went_on))
        entries = [entry.model_copy(update={"rollout_id": name}) for entry in entries]
        await put_rollout(store_url, entries, freeze=False)
        async with open_store(store_url, run=RUN) as store:
            with pytest.raises(PayloadConflictError):
                await store.sink.put(entries[0].model_copy(update={"model": "other"}))
            await store.source.freeze(name)
        options = ExportOptions(rollout_ids=(name,), include_incomplete=True)
        report = await export(store_url, tmp_path / name, options)
        found = [] if report.all_left_out else [row["call_ids"] for row in parquet_rows(tmp_path / name)]
        assert found == rows
        assert report.left_out == {"conflicting_call": 1, **({why_b: 1} if why_b else {})}


async def test_a_rollout_with_a_retry_is_no_broken_one_but_an_ambiguous_one_is(
    store_url: str, tmp_path: Path
) -> None:
    received = [
        entry.model_copy(update={"rollout_id": "received"})
        for entry in CASES["the first of two roots was lost"][0]
    ]
    await put_rollout(store_url, received)
    await put_rollout(store_url, CASES["the last call, twice"][0])
    await export(store_url, tmp_path / "out", ExportOptions(on_break=OnBreak.MASK))
    assert [row["rollout_id"] for row in parquet_rows(tmp_path / "out")] == ["received"]
    assert ("rollout-1", "b", "broken") in left_out(tmp_path / "out")


async def test_an_answer_that_no_file_holds_keeps_its_rollout_from_being_retired(
    store_url: str, tmp_path: Path
) -> None:
    await put_linear(store_url, 1)
    await put_rollout(store_url, CASES["the first of two roots was lost"][0])
    report = await export(store_url, tmp_path / "out", retire=True)
    assert [(kept.rollout_id, kept.why) for kept in report.kept] == [("rollout-1", "partly_exported")]
    assert report.retired == 1
    whole = ExportOptions(format="calls", rollout_ids=("rollout-1",))  # type: ignore[arg-type]
    assert (await export(store_url, tmp_path / "calls", whole, retire=True)).retired == 1
