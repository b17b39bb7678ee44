"""Every sampled token is trained once, after exactly the prompt after which it was sampled."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.export.exports import left_out, manifest, parquet_rows, put_rollout
from tests.support.entries import make_entry
from tests.support.forests import Forests
from tokencustody import TokenEntry, open_store
from tokencustody.chains.chains import Forest, shape_of
from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.rules import RowRules
from tokencustody.codec import hashing
from tokencustody.export import ExportOptions, OnBreak, SharedCalls, Siblings, export


def trained_in(token_ids: list[int], loss_mask: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each token that a row trains, with all that lies before it."""
    for index, (token, bit) in enumerate(zip(token_ids, loss_mask, strict=True)):
        if bit:
            yield tuple(token_ids[:index]), token


def expected(forest: Forests, names: set[str]) -> Counter[tuple[tuple[int, ...], int]]:
    """Return the same of the calls themselves, each by its own prompt and nothing else."""
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for entry in forest.entries:
        if entry.model_call_id in names:
            sampled, prompt = entry.generation_token_ids, forest.prompts[entry.model_call_id]
            found.update(((*prompt, *sampled[:index]), token) for index, token in enumerate(sampled))
    return found


def questions_of(forest: Forests) -> dict[str, set[str]]:
    """Return for each call those that answer the same question for certain, itself among them."""
    found = {name: {name} for name in forest.prompts}
    for one, other in product(forest.entries, repeat=2):
        mine, theirs = one.model_call_id, other.model_call_id
        below_one = (one.parent_call_id, one.parent_resolution) == (
            other.parent_call_id,
            other.parent_resolution,
        )
        same_prompt = forest.prompts[mine] == forest.prompts[theirs] and below_one
        same_request = forest.requests[mine] == forest.requests[theirs]
        if same_prompt or (same_request and not forest.without_request & {mine, theirs}):
            both = found[mine] | found[theirs]
            found.update(dict.fromkeys(both, both))
    return found


def check_answers(forest: Forests, out: dict[str, str]) -> None:
    """Check what became of each answer by looking at all the others, as nothing in the library does."""
    questions = questions_of(forest)
    continued = {
        entry.parent_call_id
        for entry in forest.entries
        if entry.parent_call_id not in questions[entry.model_call_id]
    }
    # What sampled nothing before the same was asked again is no other answer to it.
    asked_again = {
        entry.parent_call_id
        for entry in forest.entries
        if forest.prompts.get(str(entry.parent_call_id)) == forest.prompts[entry.model_call_id]
    }
    for entry in forest.entries:
        name = entry.model_call_id
        if name in asked_again or (name not in continued and not entry.generation_token_ids):
            continue
        answers = {
            other.model_call_id
            for other in forest.entries
            if other.model_call_id in questions[name]
            and (other.generation_token_ids or other.model_call_id in continued - asked_again)
        }
        same = {other for other in answers if forest.sequence_of(other) == forest.sequence_of(name)}
        if answers == same:
            assert len(same - set(out)) <= 1, (forest.seed, name)
        elif name not in out:
            assert answers & continued <= same, (forest.seed, name)
            assert same & continued, (forest.seed, name)
        elif out[name] == "superseded_retry" and name in continued:
            # Another call of the same tokens stands for it.
            twins = [
                other for other in forest.prompts if forest.sequence_of(other) == forest.sequence_of(name)
            ]
            assert len(twins) > 1, (forest.seed, name)


SEEDS = 400


@functools.cache
def made_up(seed: int) -> tuple[Forests, FrozenRollout]:
    """Return a rollout as it was made up and as it is read, the same for all rules."""
    forest = Forests(seed)
    return forest, forest.rollout()


RULES = [RowRules(*each) for each in product(SharedCalls, OnBreak, Siblings)]


@pytest.mark.parametrize(
    "rules", RULES, ids=lambda rules: f"{rules.shared_calls}-{rules.on_break}-{rules.siblings}"
)
def test_each_token_of_a_call_that_is_not_left_out_is_trained_once_in_the_context_in_which_it_was_sampled(
    rules: RowRules,
) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(SEEDS):
        forest, rollout = made_up(seed)
        made = Forest(rollout, rules)
        rows = list(made.chains())
        out = {left.model_call_id: left.reason for left in made.left_out if left.reason != "broken"}
        assert len(out) == sum(left.reason != "broken" for left in made.left_out), "each is named once"
        names = {entry.model_call_id for entry in forest.entries} - set(out)
        if any(left.reason == "broken" for left in made.left_out):
            assert rows == []
            kinds["broken"] += 1
            continue
        assert {link.model_call_id for row in rows for link in row.links} == names
        shape = shape_of(rollout, made.calls, made.left_out, made)
        assert shape.calls_left_out == len(out)
        trained = Counter(
            each for row in rows for each in trained_in(list(row.token_ids), list(row.loss_mask))
        )
        wanted = expected(forest, names)
        assert set(trained) == set(wanted), seed
        if rules.shared_calls is SharedCalls.FIRST:
            assert trained == wanted, seed
        for row in rows:
            for link in row.links:
                sequence = list(row.token_ids[: link.generation_start])
                assert sequence == forest.prompts[link.model_call_id], seed
        if rules.siblings is Siblings.SETTLE:
            check_answers(forest, out)
        kinds.update(out.values())
        kinds.update(row.broke for row in rows if row.broke is not None)
        if rules.on_break is not OnBreak.FIRST and rules.siblings is Siblings.KEEP:
            assert set(out.values()) <= {"no_generated_tokens", "parent_missing", "parent_left_out"}, seed
    # The chance made what it is about.
    if rules.on_break is OnBreak.SPLIT:
        assert {"unresolved_parent", "parent_missing", "prompt_does_not_begin_with_parent"} <= set(kinds)
    if rules.siblings is Siblings.SETTLE and rules.on_break is not OnBreak.MASK:
        assert {"ambiguous_retry", "superseded_retry"} <= set(kinds)


async def test_the_files_hold_of_each_call_what_was_sampled_after_exactly_its_prompt(
    store_url: str, tmp_path: Path
) -> None:
    forests = {f"forest-{seed}": Forests(seed, f"forest-{seed}") for seed in range(13, 25)}
    for forest in forests.values():
        await put_rollout(store_url, forest.entries)
    why: set[str] = set()
    for number, rules in enumerate(RULES):
        out = tmp_path / str(number)
        options = ExportOptions(
            include_incomplete=True,
            shared_calls=rules.shared_calls,
            on_break=rules.on_break,
            siblings=rules.siblings,
        )
        report = await export(store_url, out, options, mark=False)
        assert not report.all_left_out
        out_of_rows: defaultdict[str, set[str]] = defaultdict(set)
        for rollout_id, name, reason in left_out(out):
            why.add(reason)
            masked = reason == "broken"
            out_of_rows[rollout_id] |= set(forests[rollout_id].prompts) if masked else {name}
        trained: defaultdict[str, Counter[Any]] = defaultdict(Counter)
        for row in parquet_rows(out):
            trained[row["rollout_id"]].update(trained_in(row["token_ids"], row["loss_mask"]))
            for name, start in zip(row["call_ids"], row["generation_starts"], strict=True):
                assert row["token_ids"][:start] == forests[row["rollout_id"]].prompts[name]
        for rollout_id, forest in forests.items():
            wanted = expected(forest, set(forest.prompts) - out_of_rows[rollout_id])
            assert trained[rollout_id].keys() == wanted.keys(), (rollout_id, rules)
            if rules.shared_calls is SharedCalls.FIRST:
                assert trained[rollout_id] == wanted, (rollout_id, rules)
    # The chance made what it is about.
    assert why >= {"ambiguous_retry", "broken", "parent_left_out", "parent_missing", "superseded_retry"}


THINKING, TURNS = [90, 91, 92], 4


def conversation(drift: str) -> list[TokenEntry]:
    """Return turns in which the template strips the thinking, or one answer is tokenised again, or neither."""
    entries: list[TokenEntry] = []
    prompt = [1, 2]
    for turn in range(TURNS):
        answer = [*THINKING, 10 + turn]
        parent = entries[-1].model_call_id if entries else None
        entries.append(
            make_entry("talk", f"call-{turn}", prompt=list(prompt), generation=answer, parent=parent)
        )
        again = [99] if drift == "one answer" and turn == 1 else [10 + turn]
        prompt += [*([] if drift == "thinking" else THINKING), *again, 20 + turn]
    return entries


@pytest.mark.parametrize(
    ("drift", "rows"),
    [
        ("none", [["call-0", "call-1", "call-2", "call-3"]]),
        ("thinking", [["call-0"], ["call-1"], ["call-2"], ["call-3"]]),
        ("one answer", [["call-0", "call-1"], ["call-2", "call-3"]]),
    ],
)
async def test_a_conversation_whose_template_changes_its_history_is_trained_whole_in_several_rows(
    store_url: str, tmp_path: Path, drift: str, rows: list[list[str]]
) -> None:
    entries = conversation(drift)
    await put_rollout(store_url, entries)
    report = await export(store_url, tmp_path / "out", retire=True)
    found = parquet_rows(tmp_path / "out")
    assert [row["call_ids"] for row in found] == rows
    assert report.trained_tokens == TURNS * 4
    for row in found:
        for name, start in zip(row["call_ids"], row["generation_starts"], strict=True):
            (entry,) = [entry for entry in entries if entry.model_call_id == name]
            assert row["token_ids"][:start] == entry.prompt_token_ids
            assert row["loss_mask"][start : start + 4] == [1] * 4
    why = "prompt_does_not_begin_with_parent"
    assert [row["breaks"] for row in found] == [None, *[why] * (len(rows) - 1)]
    assert [(row["segment"], row["segments"]) for row in found] == [(n, len(rows)) for n in range(len(rows))]
    assert {(row["whole"], row["calls_left_out"]) for row in found} == {(True, 0)}
    # The files hold all of it.
    assert (report.retired, report.ok) == (1, True)


@pytest.mark.parametrize("form", ["calls", "gym", "parquet"])
async def test_every_format_says_in_its_manifest_how_a_rollout_comes_apart(
    store_url: str, tmp_path: Path, form: Any
) -> None:
    await put_rollout(store_url, conversation("thinking"))
    await export(store_url, tmp_path / "out", ExportOptions(format=form, run="run-1"))
    ((rollout,),) = [part["rollouts"] for part in manifest(tmp_path / "out")["parts"]]
    assert (rollout["segments"], rollout["breaks"]) == (4, {"prompt_does_not_begin_with_parent": 3})
    assert (rollout["whole"], rollout["calls_left_out"], rollout["calls"]) == (True, 0, 4)
    assert manifest(tmp_path / "out")["counts"]["breaks"] == rollout["breaks"]


async def test_branches_of_one_segment_share_its_number_and_a_new_root_is_another(
    store_url: str, tmp_path: Path
) -> None:
    entries = [
        make_entry("r", "a", prompt=[1], generation=[2]),
        make_entry("r", "b", prompt=[1, 2, 3], generation=[4], parent="a"),
        make_entry("r", "c", prompt=[1, 2, 5], generation=[6], parent="a"),
        make_entry("r", "d", prompt=[7], generation=[8]),
    ]
    await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out")
    rows = parquet_rows(tmp_path / "out")
    assert [(row["call_ids"], row["chain_index"], row["segment"], row["breaks"]) for row in rows] == [
        (["a", "b"], 0, 0, None),
        (["a", "c"], 1, 0, None),
        (["d"], 2, 1, None),
    ]


async def test_calls_without_lineage_stamps_are_rows_of_their_own(store_url: str, tmp_path: Path) -> None:
    entries = [
        entry.model_copy(update={"parent_resolution": None, "parent_call_id": None})
        for entry in conversation("none")
    ]
    await put_rollout(store_url, entries)
    report = await export(store_url, tmp_path / "out", retire=True)
    rows = parquet_rows(tmp_path / "out")
    assert [row["token_ids"] for row in rows] == [
        [*entry.prompt_token_ids, *entry.generation_token_ids] for entry in entries
    ]
    assert [sum(row["loss_mask"]) for row in rows] == [4] * TURNS
    assert [(row["breaks"], row["parent_resolutions"]) for row in rows] == [
        ("parent_not_recorded", [None])
    ] * TURNS
    assert (report.trained_tokens, report.retired, report.ok) == (TURNS * 4, 1, True)


async def test_what_was_sampled_below_a_lost_call_is_a_row_and_a_delta_below_it_cannot_be_one(
    store_url: str, tmp_path: Path
) -> None:
    full = make_entry("r", "full", prompt=[1, 2, 3], generation=[4], parent="lost")
    delta = make_entry(
        "r", "delta", prompt=[3], generation=[5], parent="lost", prompt_is_delta=True, cumulative=[1, 2, 3, 5]
    )
    below = make_entry("r", "below", prompt=[1, 2, 3, 5], generation=[6], parent="delta")
    await put_rollout(store_url, [full, delta, below], freeze=False)
    async with open_store(store_url, run="run-1") as store:
        await store.sink.begin_call("r", "lost")
        await store.source.freeze("r")
    report = await export(store_url, tmp_path / "none")
    assert (report.left_out, report.export_id, report.ok) == ({"incomplete": 1}, "", True)
    await export(store_url, tmp_path / "out", ExportOptions(include_incomplete=True))
    rows = parquet_rows(tmp_path / "out")
    assert [(row["call_ids"], row["breaks"]) for row in rows] == [
        (["full"], "parent_missing"),
        (["below"], "parent_left_out"),
    ]
    assert {(row["incomplete"], row["whole"], row["calls_left_out"]) for row in rows} == {(True, False, 1)}
    assert left_out(tmp_path / "out") == [("r", "delta", "parent_missing")]


def test_digests_that_are_made_beside_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        _, rollout = made_up(seed)
        for rules in RULES:
            monkeypatch.setattr(hashing, "_LONG", 2**60)
            expected = Forest(rollout, rules)
            monkeypatch.setattr(hashing, "_LONG", 0)
            made = Forest(rollout, rules)
            assert list(made.chains()) == list(expected.chains())
            assert made.left_out == expected.left_out
