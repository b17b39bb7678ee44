"""How concurrent calls are gathered into batches, without a database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from tokencustody.database import coalescing
from tokencustody.database.coalescing import MOST_CALLS, Gatherer
from tokencustody.errors import StoreUnavailableError

Fault = Callable[[Sequence[str]], BaseException | None]


@dataclass
class Lanes:
    """Runs batches when the test says so. An answer is the item in capitals."""

    started: list[list[str]] = field(default_factory=list)
    ended: list[list[str]] = field(default_factory=list)
    cancelled: list[list[str]] = field(default_factory=list)
    fault: Fault = lambda _: None
    most_at_once: int = 0
    _held: list[asyncio.Future[None]] = field(default_factory=list)
    cleaning: asyncio.Event | None = None

    async def run(self, items: Sequence[str], _give_up: float) -> Sequence[str]:
        self.started.append(list(items))
        held = asyncio.get_running_loop().create_future()
        self._held.append(held)
        self.most_at_once = max(self.most_at_once, len(self._held))
        try:
            await held
        except asyncio.CancelledError:
            if self.cleaning is not None:
                await self.cleaning.wait()
            self.cancelled.append(list(items))
            raise
        finally:
            self._held.remove(held)
        if (error := self.fault(items)) is not None:
            raise error
        self.ended.append(list(items))
        return [item.upper() for item in items]

    @property
    def order(self) -> list[str]:
        """The items in the order in which they were run."""
        return [item for batch in self.started for item in batch]

    def end_one(self) -> None:
        """Let the batch that has run for the longest time end."""
        self._held[0].set_result(None)

    async def end_all(self) -> None:
        """Let every batch end, those too that start meanwhile."""
        while self._held:
            for held in list(self._held):
                if not held.done():
                    held.set_result(None)
            await turns()


async def turns(number: int = 10) -> None:
    """Let the loop go round: more often than anything here needs."""
    for _ in range(number):
        await asyncio.sleep(0)


def gathering(lanes: int = 1, most_calls: int = MOST_CALLS) -> tuple[Lanes, Gatherer[str, str]]:
    running = Lanes()
    return running, Gatherer(running.run, lanes, most_calls)


def submit(gatherer: Gatherer[str, str], item: str, *, size: int = 1) -> asyncio.Task[str]:
    return asyncio.create_task(gatherer.submit(item, size=size, give_up=1e9))


async def submit_all(gatherer: Gatherer[str, str], items: str, **options: int) -> list[asyncio.Task[str]]:
    tasks = [submit(gatherer, item, **options) for item in items.split()]
    await turns()
    return tasks


@pytest.mark.parametrize("most_calls", [MOST_CALLS, 1])
async def test_a_lone_call_starts_in_the_turn_in_which_it_comes(most_calls: int) -> None:
    running, gatherer = gathering(most_calls=most_calls)
    alone = submit(gatherer, "a")
    await turns(2)  # one for each of the two tasks
    assert running.started == [["a"]]
    running.end_one()
    assert await alone == "A"


async def test_calls_that_come_while_every_lane_is_busy_share_the_next_one() -> None:
    running, gatherer = gathering(lanes=2)
    tasks = await submit_all(gatherer, "a b c d e")
    assert running.started == [["a"], ["b"]]
    running.end_one()
    await turns()
    assert running.started[2:] == [["c", "d", "e"]]
    await running.end_all()
    assert await asyncio.gather(*tasks) == ["A", "B", "C", "D", "E"]
    assert running.most_at_once == 2


async def test_a_call_is_answered_only_when_its_batch_has_ended() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "a b c")
    running.end_one()
    await turns()
    assert [task.done() for task in tasks] == [True, False, False]
    await running.end_all()


async def test_a_batch_is_bounded_in_calls_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "_MOST_BYTES", 10)
    running, gatherer = gathering(most_calls=3)
    tasks = await submit_all(gatherer, "first a b c d")
    tasks += await submit_all(gatherer, "e f g", size=5)
    tasks += await submit_all(gatherer, "huge", size=1000)
    tasks += await submit_all(gatherer, "h")
    await running.end_all()
    assert running.started == [["first"], ["a", "b", "c"], ["d", "e"], ["f", "g"], ["huge"], ["h"]]
    assert all(task.done() for task in tasks)


async def test_switched_off_no_batch_holds_two_calls_and_they_run_in_their_order() -> None:
    running, gatherer = gathering(most_calls=1)
    tasks = await submit_all(gatherer, "a b c d")
    await running.end_all()
    assert running.started == [["a"], ["b"], ["c"], ["d"]]
    assert [task.result() for task in tasks] == ["A", "B", "C", "D"]


async def test_a_call_that_a_whole_batch_fails_for_fails_alone() -> None:
    running, gatherer = gathering()
    running.fault = lambda items: KeyError("bad") if "bad" in items else None
    tasks = await submit_all(gatherer, "first a bad b")
    await running.end_all()
    assert [tasks[n].result() for n in (0, 1, 3)] == ["FIRST", "A", "B"]
    assert isinstance(tasks[2].exception(), KeyError)
    assert running.started == [["first"], ["a", "bad", "b"], ["a"], ["bad"], ["b"]]


async def test_a_batch_that_fails_once_for_another_reason_is_run_again_one_by_one() -> None:
    running, gatherer = gathering()
    running.fault = lambda items: KeyError("too many") if len(items) > 1 else None
    tasks = await submit_all(gatherer, "first a b c")
    await running.end_all()
    assert [task.result() for task in tasks] == ["FIRST", "A", "B", "C"]


async def test_an_unavailable_database_is_not_asked_again_for_each_call() -> None:
    running, gatherer = gathering()
    running.fault = lambda items: StoreUnavailableError("gone") if len(items) > 1 else None
    tasks = await submit_all(gatherer, "first a b c")
    await running.end_all()
    assert [type(task.exception()) for task in tasks[1:]] == [StoreUnavailableError] * 3
    assert running.started == [["first"], ["a", "b", "c"]]


@pytest.mark.parametrize("most_calls", [MOST_CALLS, 1])
async def test_a_call_that_is_cancelled_while_it_waits_is_never_run(most_calls: int) -> None:
    running, gatherer = gathering(most_calls=most_calls)
    tasks = await submit_all(gatherer, "first a b c")
    tasks[2].cancel()
    await turns()
    assert tasks[2].cancelled()
    await running.end_all()
    assert running.order == ["first", "a", "c"]
    assert [tasks[n].result() for n in (0, 1, 3)] == ["FIRST", "A", "C"]


async def test_a_call_that_is_cancelled_while_its_batch_runs_takes_no_neighbour_with_it() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first a b c")
    running.end_one()
    await turns()
    tasks[1].cancel()
    tasks[3].cancel()
    await turns()
    assert tasks[1].cancelled()
    assert tasks[3].cancelled()
    await running.end_all()
    assert tasks[2].result() == "B"
    assert running.cancelled == []


async def test_when_the_last_call_of_a_batch_is_cancelled_it_leaves_after_the_transaction() -> None:
    running, gatherer = gathering()
    running.cleaning = asyncio.Event()
    tasks = await submit_all(gatherer, "first a b")
    running.end_one()
    await turns()
    tasks[1].cancel()
    tasks[2].cancel()
    await turns()
    assert (tasks[1].done(), tasks[2].done()) == (True, False)
    tasks[2].cancel()  # an impatient caller
    await turns()
    assert not tasks[2].done()
    late = submit(gatherer, "late")
    await turns()
    assert running.started == [["first"], ["a", "b"]]  # the lane is still busy
    running.cleaning.set()
    await turns()
    assert tasks[2].cancelled()
    assert running.cancelled == [["a", "b"]]
    await running.end_all()
    assert late.result() == "LATE"


@pytest.mark.parametrize("others", ["", "b c"])
async def test_calls_whose_batch_is_cancelled_from_outside_do_not_wait_for_ever(others: str) -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, f"first a {others}")
    running.fault = lambda items: asyncio.CancelledError() if "a" in items else None
    await running.end_all()
    late = submit(gatherer, "late")
    await turns()
    await running.end_all()
    assert late.result() == "LATE"
    assert [task.done() for task in tasks] == [True] * len(tasks)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten bytes may wait."""
    monkeypatch.setattr(coalescing, "_MOST_WAITING_BYTES", 10)


@pytest.mark.usefixtures("little_room")
async def test_callers_wait_outside_for_room_and_go_on_in_their_order() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first a b c d e f", size=4)
    assert running.started == [["first"]]
    await running.end_all()
    assert running.order == ["first", "a", "b", "c", "d", "e", "f"]
    assert [task.result() for task in tasks] == ["FIRST", "A", "B", "C", "D", "E", "F"]
    # Two at most fit beside one another.
    assert max(len(batch) for batch in running.started) <= 2


@pytest.mark.usefixtures("little_room")
async def test_a_call_larger_than_all_room_goes_when_nothing_else_waits() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first", size=4)
    tasks += await submit_all(gatherer, "huge", size=1000)
    tasks += await submit_all(gatherer, "last", size=4)
    assert running.started == [["first"]]
    await running.end_all()
    assert running.started == [["first"], ["huge"], ["last"]]
    assert all(task.done() for task in tasks)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("late_by", range(6))
async def test_nobody_who_comes_later_overtakes_a_call_that_waits_outside(late_by: int) -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first", size=8)
    tasks += await submit_all(gatherer, "waiting", size=8)
    running.end_one()
    await turns(late_by)  # at one of these turns there is room, and the one who waits does not know it yet
    tasks.append(submit(gatherer, "late", size=8))
    await turns()
    await running.end_all()
    assert running.started == [["first"], ["waiting"], ["late"]]
    assert all(task.done() for task in tasks)


@pytest.mark.usefixtures("little_room")
async def test_a_caller_who_gives_up_outside_costs_those_before_it_nothing() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first a b c d", size=8)
    tasks[3].cancel()
    await turns()
    await running.end_all()
    assert running.order == ["first", "a", "b", "d"]
    assert tasks[3].cancelled()


@pytest.mark.usefixtures("little_room")
async def test_when_a_large_call_ends_all_for_whom_there_is_room_go_on_together() -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first", size=10)
    tasks += await submit_all(gatherer, "a b c d e", size=2)
    await running.end_all()
    # The first to come in finds a free lane; the others gather meanwhile.
    assert len(running.started) <= 3, running.started
    assert all(task.done() for task in tasks)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("gives_up_after", range(6))
async def test_room_that_was_given_to_a_cancelled_caller_is_passed_on(gives_up_after: int) -> None:
    running, gatherer = gathering()
    tasks = await submit_all(gatherer, "first a b", size=8)
    running.end_one()
    await turns(gives_up_after)  # at one of these turns `a` has been given room and has not come in yet
    tasks[1].cancel()
    await turns()
    await running.end_all()
    assert tasks[2].result() == "B"


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("where", ["in a batch", "behind a batch", "outside"])
async def test_a_call_gives_up_at_its_own_time_wherever_it_waits(where: str) -> None:
    running, gatherer = gathering()
    soon = asyncio.get_running_loop().time() + 0.05
    first = submit(gatherer, "first", size=10 if where == "outside" else 2)
    waiting = asyncio.create_task(gatherer.submit("waiting", size=2, give_up=soon))
    neighbour = submit(gatherer, "neighbour")
    if where == "in a batch":
        await turns()
        running.end_one()
        await turns()
        assert running.started == [["first"], ["waiting", "neighbour"]]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 5)
    await running.end_all()
    assert (first.result(), neighbour.result()) == ("FIRST", "NEIGHBOUR")
    assert running.order.count("waiting") == (where == "in a batch")


async def test_a_batch_is_given_until_its_last_call_gives_up() -> None:
    running, gatherer = gathering()
    until: list[float] = []

    async def run(items: Sequence[str], give_up: float) -> Sequence[str]:
        until.append(give_up)
        return await running.run(items, give_up)

    gatherer.run = run
    later = asyncio.get_running_loop().time() + 100
    first = submit(gatherer, "first")
    await turns()
    others = [asyncio.create_task(gatherer.submit(f"{n}", size=1, give_up=later + n)) for n in (0, 2, 1)]
    await turns()
    await running.end_all()
    assert until[1:] == [later + 2]
    assert [task.result() for task in (first, *others)] == ["FIRST", "0", "2", "1"]


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("most_calls", [4, 1])
@pytest.mark.parametrize("seed", range(20))
async def test_whatever_happens_each_call_is_answered_once_and_all_room_is_free_again(
    seed: int, most_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coalescing, "_MOST_BYTES", 6)
    rng = random.Random(seed)
    running, gatherer = gathering(rng.randint(1, 3), most_calls)

    def fault(items: Sequence[str]) -> BaseException | None:
        if any(item.startswith("bad") for item in items):
            return KeyError("bad")
        if any(item.startswith("gone") for item in items):
            return StoreUnavailableError("gone")
        return None

    running.fault = fault
    tasks: dict[str, asyncio.Task[str]] = {}
    cancelled: set[str] = set()
    for number in range(200):
        match rng.randrange(6):
            case 0 | 1 | 2:
                name = f"{rng.choice(['good'] * 8 + ['bad', 'gone'])}-{number}"
                tasks[name] = submit(gatherer, name, size=rng.choice([1, 2, 3, 12]))
            case 3 if running._held:
                held = rng.choice(running._held)
                if not held.done():
                    held.set_result(None)
            case 4 if tasks:
                name = rng.choice(list(tasks))
                if tasks[name].cancel():
                    cancelled.add(name)
            case _:
                await turns(rng.randint(1, 4))
    await turns()
    await running.end_all()
    await asyncio.wait(tasks.values(), timeout=10)
    assert all(task.done() for task in tasks.values())
    for name, task in tasks.items():
        if task.cancelled():
            assert name in cancelled
        elif name.startswith("bad"):
            assert isinstance(task.exception(), KeyError)
        elif task.exception() is not None:
            assert isinstance(task.exception(), StoreUnavailableError)
            assert any(
                name in batch and any(i.startswith("gone") for i in batch) for batch in running.started
            )
        else:
            assert task.result() == name.upper()
            assert sum(batch.count(name) for batch in running.ended) == 1
    assert running.most_at_once <= gatherer.lanes
    last = submit(gatherer, "last", size=10)
    await turns(3)
    assert running.started[-1] == ["last"]
    await running.end_all()
    assert last.result() == "LAST"
