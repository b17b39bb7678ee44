"""Each check has a broken transport that it catches, and catches nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.conformance.broken import BROKEN
from tests.conformance.ledger import MemoryLedger
from tests.conformance.memory import Memory
from tests.conformance.staging import MemoryStaging
from tests.conformance.transport import Client, factories
from tokencustody.conformance import CheckStatus, check_conformance, registered_checks

# Two checks that take seconds run only where they are the point.
SLOW = {"exact_long_lists", "strict_fence"}
QUICK_NAMES = [check.name for check in registered_checks() if check.name not in SLOW]
# A ledger is a client of records too.
KINDS: tuple[type[Client], ...] = (MemoryLedger, MemoryStaging, Memory)


_reached: dict[type[Client], set[str]] = {}


async def reached_by(client: type[Client]) -> set[str]:
    """Return the checks that make such a client; the others could not tell that it is broken."""
    if not _reached:
        _reached.update(await _find_reached())
    return _reached[next(kind for kind in KINDS if issubclass(client, kind))]


async def _find_reached() -> dict[type[Client], set[str]]:
    """Run the checks once on the reference, and return which make a client of each kind."""
    running: list[str] = []
    reached: dict[type[Client], set[str]] = {kind: set() for kind in KINDS}

    def noting(kind: type[Client], make: Callable[[], Any]) -> Callable[[], Any]:
        def noted() -> Any:
            # Before the first check the kit makes one of each, to see what they can do.
            reached[kind].update(running[-1:])
            return make()

        return noted

    kinds: dict[str, type[Client]] = {"ledger_factory": MemoryLedger, "staging_factory": MemoryStaging}
    given = {}
    for argument, make in factories().items():
        noted = partial(noting, kinds.get(argument, Memory))
        given[argument] = tuple(map(noted, make)) if isinstance(make, tuple) else noted(make)
    report = await check_conformance(
        **given, only=QUICK_NAMES, on_start=lambda check: running.append(check.name)
    )
    assert report.ok, report.summary()
    return reached


@pytest.mark.parametrize(("client", "caught_by"), BROKEN.items(), ids=[client.__name__ for client in BROKEN])
async def test_a_broken_transport_fails_exactly_the_checks_of_its_promise(
    client: type[Client], caught_by: set[str]
) -> None:
    report = await check_conformance(**factories(client), only=[*(await reached_by(client) | caught_by)])
    assert {result.name for result in report.failed} == caught_by, report.summary()
    assert all(result.detail for result in report.failed)


async def test_the_reference_transport_passes_every_check() -> None:
    report = await check_conformance(**factories())
    assert [result.status for result in report.results] == [CheckStatus.PASSED] * len(registered_checks()), (
        report.summary()
    )


def test_every_check_is_caught_by_some_broken_transport() -> None:
    assert set().union(*BROKEN.values()) == {check.name for check in registered_checks()}
