"""What a worker and a trainer are granted is all that they need: each method of the stores, in every mode."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.faults.methods import METHODS, right_answer
from tests.roles.secured import Ledger, Source, Staging, Users, secured_database
from tests.support.postgres import Server
from tokencustody import open_store
from tokencustody.conformance import CheckStatus, check_conformance, registered_checks
from tokencustody.database.coalescing import Coalesce
from tokencustody.errors import AccessDeniedError
from tokencustody.roles.granting import grant
from tokencustody.states import Role
from tokencustody.store import SqlLineageStore, SqlTokenSink

WORKERS = {
    "put",
    "put_continuation",
    "put again",
    "conflicting put, statement",
    "conflicting put",
    "late put",
    "begin_call",
    "refuse_call",
    "mark_incomplete",
    "record",
    "record_failure",
    "import_rows",
    "late record",
    "late record_failure",
    "late import_rows",
    "stage",
    "stage with attachments",
    "late stage",
    "conflicting stage",
}
TRAINERS = {"mark_incomplete", "freeze", "drop", "retire", "unstage"}


@pytest.fixture(scope="module")
def users(postgres: Server) -> Iterator[Users]:
    with secured_database(postgres, "worker", "trainer") as (database, (worker, trainer)):
        grant(database.url, Role.WORKER, worker, ["here", "there"])
        grant(database.url, Role.TRAINER, trainer, ["here", "there"])
        yield Users(database.url, database.url_as(worker), database.url_as(trainer))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("user", "allowed"), [("worker", WORKERS), ("trainer", TRAINERS)])
async def test_each_method_is_for_those_whose_it_is(
    users: Users, user: str, allowed: set[str], name: str
) -> None:
    method, rollout = METHODS[name], f"{user}-{list(METHODS).index(name)}"
    async with (
        open_store(users.owner, run="here") as owner,
        open_store(getattr(users, user), run="here") as store,
    ):
        await method.prepare(owner, rollout)
        if name in allowed:
            assert right_answer(method, rollout, await method.run(store, rollout))
            assert method.after is None or await method.after(owner, rollout)
        elif method.soft:
            assert await method.run(store, rollout) is False
        else:
            with pytest.raises(AccessDeniedError):
                await method.run(store, rollout)


# What calls that share a transaction meet together, in the modes beside the first.
SHARED = [
    "idempotent_reput",
    "conflicting_reput",
    "concurrent_conflicting_put",
    "post_freeze_write",
    "post_freeze_intent",
    "refused_intent",
    "lineage_delta_chain",
    "concurrent_conflicting_stages",
]


@pytest.mark.race
@pytest.mark.parametrize(
    ("mode", "only"), [(Coalesce.PROCESS, None), (Coalesce.ROLLOUT, SHARED), (Coalesce.OFF, SHARED)]
)
async def test_a_worker_and_a_trainer_keep_every_promise_together(
    users: Users, mode: Coalesce, only: list[str] | None
) -> None:
    here: dict[str, Any] = {"run": "here", "coalesce": mode}
    there = here | {"run": "there"}
    report = await check_conformance(
        partial(SqlTokenSink, users.worker, **here),
        partial(Source, users, **here),
        partial(SqlLineageStore, users.worker, **here),
        other_namespace=(partial(SqlTokenSink, users.worker, **there), partial(Source, users, **there)),
        ledger_factory=partial(Ledger, users, **here),
        staging_factory=partial(Staging, users, **here),
        only=only,
    )
    passed = [CheckStatus.PASSED] * len(only or registered_checks())
    assert [result.status for result in report.results] == passed, report.summary()
    assert only or "against 3 processes" in report.results[-1].detail
