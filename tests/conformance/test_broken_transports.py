"""Each check has a broken transport that it catches, and catches nothing else."""

from __future__ import annotations

import pytest

from tests.conformance.broken import BROKEN
from tests.conformance.ledger import MemoryLedger
from tests.conformance.staging import MemoryStaging
from tests.conformance.transport import Client, factories
from tokencustody.conformance import CheckStatus, check_conformance, registered_checks

# Two checks that take seconds run only where they are the point.
SLOW = {"exact_long_lists", "strict_fence"}
QUICK = [check for check in registered_checks() if check.name not in SLOW]


def reached_by(client: type[Client]) -> set[str]:
    """Return the checks that make such a client; the others could not tell that it is broken."""
    if issubclass(client, MemoryLedger):
        return {check.name for check in QUICK if "ledger" in check.needs}
    if issubclass(client, MemoryStaging):
        return {check.name for check in QUICK if "staging" in check.needs}
    return {check.name for check in QUICK}


@pytest.mark.parametrize(("client", "caught_by"), BROKEN.items(), ids=[client.__name__ for client in BROKEN])
async def test_a_broken_transport_fails_exactly_the_checks_of_its_promise(
    client: type[Client], caught_by: set[str]
) -> None:
    report = await check_conformance(**factories(client), only=[*(reached_by(client) | caught_by)])
    assert {result.name for result in report.failed} == caught_by, report.summary()
    assert all(result.detail for result in report.failed)


async def test_the_reference_transport_passes_every_check() -> None:
    report = await check_conformance(**factories())
    assert [result.status for result in report.results] == [CheckStatus.PASSED] * len(registered_checks()), (
        report.summary()
    )


def test_every_check_is_caught_by_some_broken_transport() -> None:
    assert set().union(*BROKEN.values()) == {check.name for check in registered_checks()}
