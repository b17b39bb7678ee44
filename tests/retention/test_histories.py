"""After any sequence of writes, retirements, deletions and collections, what remains reads as it was written."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.entries import continuation, make_entry
from tests.support.ledger import make_commit
from tests.support.staged import Staged, stage
from tokencustody import CaptureStore, TokenCaptureFrozenError, TokenEntry, open_store
from tokencustody.retention.retention import Retention, Settled
from tokencustody.states import FenceState
from tokencustody.txn.selection import RolloutFilter

ROLLOUTS = ("a", "ab", "b")
_runs = itertools.count()

rollouts = st.sampled_from(ROLLOUTS)
parents = st.integers(0, 3)
steps = st.one_of(
    st.tuples(st.just("put"), rollouts, parents, st.booleans()),
    st.tuples(st.just("put"), rollouts, parents, st.booleans()),
    st.tuples(st.just("stage"), rollouts, parents),
    st.tuples(st.just("stage"), rollouts, parents),
    st.tuples(st.just("record"), rollouts, parents, rollouts),
    st.tuples(st.just("freeze"), rollouts),
    st.tuples(st.just("mark"), rollouts),
    st.tuples(
        st.sampled_from(["retire", "delete"]),
        st.sampled_from([None, *FenceState]),
        st.sampled_from(["a", "b"]),
    ),
    st.tuples(st.just("gc"), st.booleans()),
    st.tuples(st.just("gc fences")),
)


@dataclass
class Model:
    """One run as it must be: states, what each rollout holds, and which staged calls ledgers name."""

    states: dict[str, FenceState] = field(default_factory=dict)
    entries: dict[str, list[tuple[TokenEntry, list[int], int]]] = field(default_factory=dict)
    staged: dict[str, dict[str, Staged]] = field(default_factory=dict)
    old: set[str] = field(default_factory=set)
    named: dict[str, set[str]] = field(default_factory=dict)

    def forget(self, rollout: str) -> None:
        """Let the records of a rollout go."""
        self.entries.pop(rollout, None)
        self.named.pop(rollout, None)

    def needed(self, rollout: str) -> set[str]:
        """Return which staged calls of a rollout must stay when the old ones that nobody will read are collected."""
        staged = self.staged.get(rollout, {})
        named = set().union(*self.named.values())
        needed = set()
        for call in staged:
            key = f"{rollout}/{call}"
            if self.states.get(rollout) is FenceState.OPEN or key in named or key not in self.old:
                link: str | None = call
                while link is not None:
                    needed.add(link)
                    link = staged[link].record.parent_call_id if link in staged else None
        return needed & set(staged)


class History:
    """Takes steps in the database and in the model."""

    def __init__(self, store: CaptureStore, retention: Retention) -> None:
        self.store, self.retention, self.model = store, retention, Model()
        self.run = store.sink.run
        self._names = itertools.count()
        self._old_since = datetime.now(UTC)

    async def put(self, rollout: str, parent: int, is_delta: bool) -> None:
        """Put a root or a child of one of the newest calls, whose prompt the database then shares."""
        held = self.model.entries.get(rollout, [])
        name = f"call-{next(self._names)}"
        before = held[-parent] if 0 < parent <= len(held) else None
        known, depth = (before[1], before[2] + 1) if before else ([], 0)
        added, sampled = [100 + depth, 7], [200 + len(held)]
        sequence = [*known, *added, *sampled]
        entry = make_entry(
            rollout,
            name,
            prompt=added if before and is_delta else [*known, *added],
            generation=sampled,
            request=continuation([{"role": "user", "content": name}], "so", "and?"),
            parent=before[0].model_call_id if before else None,
            cumulative=sequence,
            prompt_is_delta=bool(before and is_delta),
        )
        with suppress(TokenCaptureFrozenError):
            await self.store.sink.put(entry)
            self.model.entries.setdefault(rollout, []).append((entry, sequence, depth))
            self.model.states[rollout] = FenceState.OPEN

    async def stage(self, rollout: str, parent: int) -> None:
        """Stage a root or a child of one of the newest staged calls."""
        held = self.model.staged.setdefault(rollout, {})
        name = f"call-{next(self._names)}"
        before = list(held.values())[-parent] if 0 < parent <= len(held) else None
        made = stage(name, before, added=[len(held)], rollout=rollout)
        assert (await asyncio.to_thread(self.store.staging.stage, made.snapshot)).ok
        held[name] = made

    async def record(self, rollout: str, which: int, into: str) -> None:
        """Let a ledger, of the rollout or of another, name a staged call."""
        held = self.model.staged.get(rollout, {})
        if self.model.states.get(into) is FenceState.RETIRED or which >= len(held):
            return
        name = list(held)[which]
        key = f"{rollout}/{name}"
        await self.store.lineage.record(make_commit(into, f"{rollout}-{name}", staging_key=key))
        self.model.named.setdefault(into, set()).add(key)
        self.model.states.setdefault(into, FenceState.OPEN)

    async def freeze(self, rollout: str) -> None:
        if self.model.states.get(rollout) is not FenceState.RETIRED:
            await self.store.source.freeze(rollout)
            self.model.states[rollout] = FenceState.FROZEN

    async def mark(self, rollout: str) -> None:
        if self.model.states.get(rollout) is not FenceState.RETIRED:
            await self.store.sink.mark_incomplete(rollout, "lost")
            self.model.states.setdefault(rollout, FenceState.OPEN)

    async def remove(self, how: str, state: FenceState | None, prefix: str) -> None:
        wanted = RolloutFilter(run=self.run, state=state, prefix=prefix)
        settled: list[Settled] = []
        await getattr(self.retention, how)(wanted, settled.append)
        meant = {
            rollout
            for rollout, held in self.model.states.items()
            if rollout.startswith(prefix) and state in (None, held)
        }
        done = (
            meant if how == "delete" else {r for r in meant if self.model.states[r] is not FenceState.RETIRED}
        )
        assert {of.key.rollout_id for of in settled if of.removed} == done
        for rollout in done:
            self.model.forget(rollout)
            if how == "delete":
                del self.model.states[rollout]
            else:
                self.model.states[rollout] = FenceState.RETIRED

    async def collect(self, *, everything: bool) -> None:
        """Collect what was staged until now, or until the last time."""
        if everything:
            self._old_since = datetime.now(UTC)
            self.model.old = {
                f"{rollout}/{call}" for rollout, held in self.model.staged.items() for call in held
            }
        expected = {rollout: self.model.needed(rollout) for rollout in self.model.staged}
        gone = sum(len(held) - len(expected[rollout]) for rollout, held in self.model.staged.items())
        assert await self.retention.orphans(self._old_since, self.run) == gone
        settled: list[Settled] = []
        await self.retention.collect(self._old_since, settled.append, self.run)
        assert sum(of.rows for of in settled) == gone
        for rollout, held in self.model.staged.items():
            self.model.staged[rollout] = {call: held[call] for call in held if call in expected[rollout]}

    async def collect_fences(self) -> None:
        await self.remove("delete", FenceState.RETIRED, "a")

    async def check(self) -> None:
        """Compare everything that can be read with what was written."""
        for rollout, held in self.model.staged.items():
            for call, staged in held.items():
                chain = [call]
                while (parent := held[chain[0]].record.parent_call_id) is not None:
                    chain.insert(0, parent)
                keys = [f"{rollout}/{link}" for link in chain]
                rebuilt = await asyncio.to_thread(self.store.staging.fetch_prefix_token_ids, keys)
                assert rebuilt == staged.token_ids
        found = await self.retention.states(RolloutFilter(run=self.run))
        assert {key.rollout_id: state for key, state in found.items()} == self.model.states
        for rollout, state in self.model.states.items():
            if state is not FenceState.RETIRED:
                entries = (await self.store.source.freeze(rollout)).entries
                written = [entry for entry, _, _ in self.model.entries.get(rollout, [])]
                assert sorted(entries, key=_name) == sorted(written, key=_name)
                manifest = await self.store.lineage.manifest(rollout)
                named = {row["staging_key"] for row in manifest["records"]}
                assert named == self.model.named.get(rollout, set())


def _name(entry: TokenEntry) -> str:
    return entry.model_call_id


async def live(url: str, history: list[tuple[object, ...]]) -> None:
    run = f"run-{next(_runs)}"
    async with open_store(url, run=run) as store, Retention(url) as retention:
        taken = History(store, retention)
        for name, *arguments in history:
            match name:
                case "retire" | "delete":
                    await taken.remove(str(name), *arguments)  # type: ignore[arg-type]
                case "gc":
                    await taken.collect(everything=bool(arguments[0]))
                case "gc fences":
                    await taken.collect_fences()
                case _:
                    await getattr(taken, str(name))(*arguments)
        await taken.check()


EXAMPLES = {"sqlite": 60, "postgresql": 30}


def test_what_retention_leaves_reads_exactly_and_every_staged_call_rebuilds(store_url: str) -> None:
    @settings(max_examples=EXAMPLES[store_url.partition(":")[0]])
    @given(st.lists(steps, min_size=8, max_size=30))
    def hold(history: list[tuple[object, ...]]) -> None:
        asyncio.run(live(store_url, history))

    hold()
