"""A PostgreSQL database that was dumped and restored is the same to `db check`, to its roles and to `verify`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.roles.secured import Secured, secured_database, server_user
from tests.support import databases, dumps, probes
from tests.support.filled import filled_template
from tests.support.postgres import OWN_ROUTES, Server, fetch, postgres_server
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.errors import SchemaMismatchError
from tokencustody.roles.catalogue import Granted
from tokencustody.roles.granting import grant, revoke, roles
from tokencustody.roles.roles import identifier
from tokencustody.schema import migrate
from tokencustody.states import Role
from tokencustody.verify import verify

ALTERED = {
    "audit_calls": ("FROM entries e", "FROM entries e WHERE run <> 'hidden'"),
    "audit_conflicts": ("'refusal_conflict'::text", "'another_conflict'::text"),
    "audit_incomplete": ("true AS masks_rollout", "false AS masks_rollout"),
    "audit_integrity": ("'staged_call'::text AS kind", "'staged_call'::text::varchar(4)::text AS kind"),
    "audit_rollouts": ("(x.refused_at IS NULL)", "true"),
    "audit_staging": ("<> 'open'::text", "<> 'frozen'::text"),
    "audit_versions": (".recorded_at", ".recorded_at + interval '1 hour' AS recorded_at"),
}


@pytest.fixture(scope="module")
def server(postgres: Server) -> Iterator[Server]:
    """A server whose programs are at hand."""
    with ExitStack() as stack:
        yield postgres if postgres.programs else stack.enter_context(postgres_server(OWN_ROUTES))


@pytest.fixture(scope="module")
def filled(server: Server) -> Iterator[str]:
    def migrate_and_fill(url: str) -> None:
        migrate.upgrade(url)
        asyncio.run(fill(url))

    with filled_template(server, None, migrate_and_fill) as name:
        yield name


@pytest.fixture(scope="module")
def restored(server: Server, filled: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    dumped = dumps.dump(server, server.url_of(filled), tmp_path_factory.mktemp("dumped") / "dump", "custom")
    with filled_template(server, None, lambda url: dumps.restore(server, dumped, url)) as name:
        yield name


@pytest.fixture
def filled_url(server: Server, filled: str) -> Iterator[str]:
    with databases.fresh(server, filled) as url:
        yield url


@pytest.fixture
def restored_url(server: Server, restored: str) -> Iterator[str]:
    """A database as a restore of the filled one leaves it."""
    with databases.fresh(server, restored) as url:
        yield url


async def fill(url: str) -> None:
    for run in ("here", "elsewhere"):
        async with open_store(url, run=run) as store:
            for turn in linear_rollout(3):
                await store.sink.put(turn.entry)
            await store.source.freeze("rollout")


@pytest.mark.quick("A backup is whole")
@pytest.mark.parametrize("form", dumps.FORMATS)
def test_a_restored_database_passes_the_check_and_so_does_a_restore_of_it(
    server: Server, filled_url: str, tmp_path: Path, form: str
) -> None:
    with databases.fresh(server) as once, databases.fresh(server) as twice:
        dumps.restore(server, dumps.dump(server, filled_url, tmp_path / "first", form), once)
        dumps.restore(server, dumps.dump(server, once, tmp_path / "second", form), twice)
        for restored in (once, twice):
            assert migrate.check(restored) == []
            said: list[str] = []
            assert migrate.upgrade(restored, progress=said.append) == (migrate.HEAD, migrate.HEAD)
            assert said == []
        found = verify(twice)
        assert (found.ok, found.counts.calls) == (True, 6)


@pytest.mark.parametrize("view", ALTERED)
def test_the_check_names_a_view_that_was_altered_after_a_restore_and_an_upgrade_makes_it_anew(
    restored_url: str, view: str
) -> None:
    ((definition,),) = probes.rows(restored_url, f"SELECT pg_get_viewdef('{view}'::regclass)")
    before, after = ALTERED[view]
    assert before in definition
    # In one word, at its last place.
    altered = after.join(definition.rsplit(before, 1))
    probes.rows(restored_url, f"CREATE OR REPLACE VIEW {view} AS {altered}")
    assert migrate.check(restored_url) == [f"missing: view {view}", f"unexpected: view {view}, altered"]
    said: list[str] = []
    migrate.upgrade(restored_url, progress=said.append)
    assert said == [f"made anew: view {view}"]
    assert migrate.check(restored_url) == []
    assert probes.rows(restored_url, f"SELECT pg_get_viewdef('{view}'::regclass)") == [(definition,)]


def test_a_view_with_other_columns_is_left_to_a_person(filled_url: str) -> None:
    probes.rows(filled_url, "DROP VIEW audit_calls")
    probes.rows(filled_url, "CREATE VIEW audit_calls AS SELECT 1 AS run")
    probes.rows(filled_url, "CREATE VIEW on_top AS SELECT run FROM audit_calls")
    with pytest.raises(SchemaMismatchError, match="another audit_calls than the view"):
        migrate.upgrade(filled_url)
    assert migrate.check(filled_url) == ["missing: view audit_calls", "unexpected: view audit_calls, altered"]


def test_a_database_that_was_restored_at_the_revision_before_is_upgraded_to_one_that_passes(
    server: Server, tmp_path: Path
) -> None:
    with databases.fresh(server) as old, databases.fresh(server) as url:
        migrate.upgrade(old, "0004_audit")
        dumps.restore(server, dumps.dump(server, old, tmp_path / "dump", "custom"), url)
        migrate.upgrade(url)
        assert migrate.check(url) == []


@pytest.mark.parametrize("path", ["captures", "captures,public", "public,captures"])
def test_tables_in_a_schema_of_their_own_pass_by_whatever_path_leads_there(
    server: Server, tmp_path: Path, path: str
) -> None:
    with databases.fresh(server) as made, databases.fresh(server) as url:
        fetch(made, "CREATE SCHEMA captures")
        migrate.upgrade(f"{made}?options=-csearch_path%3Dcaptures")
        dumps.restore(server, dumps.dump(server, made, tmp_path / "dump", "custom"), url)
        assert migrate.check(f"{url}?options=-csearch_path%3D{path}") == []
        assert migrate.check(f"{made}?options=-csearch_path%3D{path}") == []


def test_an_upgrade_mends_functions_whose_schema_was_given_another_name(
    server: Server, tmp_path: Path
) -> None:
    with databases.fresh(server) as url:
        fetch(url, "CREATE SCHEMA captures")
        migrate.upgrade(f"{url}?options=-csearch_path%3Dcaptures")
        fetch(url, "ALTER SCHEMA captures RENAME TO moved")
        there = f"{url}?options=-csearch_path%3Dmoved"
        assert "unexpected: function audit_uint64, altered" in migrate.check(there)
        migrate.upgrade(there)
        assert migrate.check(there) == []


def test_a_restore_for_another_owner_passes_for_that_one_and_for_a_role_that_only_reads(
    server: Server, filled_url: str, tmp_path: Path
) -> None:
    with server_user(server, "other_owner") as owner, databases.fresh(server) as url:
        fetch(url, f"GRANT CREATE ON SCHEMA public TO {identifier(owner)}")
        theirs = Secured(server, url.rpartition("/")[2], owner).url
        dumped = dumps.dump(server, filled_url, tmp_path / "dump", "custom", "--no-owner")
        dumps.restore(server, dumped, theirs, "--no-owner")
        with server_user(server, "reader") as reader:
            grant(theirs, Role.AUDITOR, reader)
            assert migrate.check(Secured(server, url.rpartition("/")[2], reader).url) == []
            assert migrate.check(theirs) == []
            # Who cannot make a view anew is asked nothing.
            fetch(url, "COMMENT ON VIEW audit_calls IS 'tokencustody 9 as it was worded then'")
            reading = Secured(server, url.rpartition("/")[2], reader).url
            assert migrate.upgrade(reading) == (migrate.HEAD, migrate.HEAD)
            revoke(theirs, reader)
        fetch(url, f"DROP OWNED BY {identifier(owner)}")


@pytest.mark.parametrize("form", dumps.FORMATS)
def test_roles_are_as_granted_after_a_restore_and_others_can_be_granted_beside_them(
    server: Server, tmp_path: Path, form: str
) -> None:
    with ExitStack() as stack:
        made, (worker, trainer, auditor, late) = stack.enter_context(
            secured_database(server, "worker", "trainer", "auditor", "late")
        )
        asyncio.run(fill(made.url))
        grant(made.url, Role.WORKER, worker, ["here"])
        grant(made.url, Role.TRAINER, trainer)
        grant(made.url, Role.AUDITOR, auditor)
        restored = Secured(server, databases.create(server, "restored"), made.owner)
        stack.callback(databases.drop, server, restored.database)
        dumps.restore(server, dumps.dump(server, made.admin_url, tmp_path / "dump", form), restored.admin_url)

        assert migrate.check(restored.url) == []
        held = {each.name: each for each in roles(restored.url).granted}
        assert held == {each.name: each for each in roles(made.url).granted}
        assert held[worker] == Granted(worker, Role.WORKER, ("here",), migrate.HEAD)
        # Row security came along: the worker sees its run alone.
        for user, runs in ((worker, {"here"}), (trainer, {"here", "elsewhere"})):
            assert {row["run"] for row in fetch(restored.url_as(user), "SELECT run FROM entries")} == runs
        assert fetch(restored.url_as(auditor), "SELECT count(*) FROM audit_rollouts")[0][0] == 2

        # As on another server, where the number that a policy is named by may be that of somebody else.
        of_worker, of_late = (
            str(fetch(made.admin_url, f"SELECT '{name}'::regrole::oid::bigint")[0][0])
            for name in (worker, late)
        )
        policies = fetch(restored.admin_url, f"SELECT * FROM pg_policies WHERE '{worker}' = ANY (roles)")
        assert policies
        for each in policies:
            before = each["policyname"]
            fetch(
                restored.admin_url,
                f'ALTER POLICY "{before}" ON {each["tablename"]} RENAME TO "{before.replace(of_worker, of_late)}"',
            )
        grant(restored.url, Role.WORKER, late, ["elsewhere"])
        grant(restored.url, Role.WORKER, worker, ["there"])
        held = {each.name: each for each in roles(restored.url).granted}
        assert held[late] == Granted(late, Role.WORKER, ("elsewhere",), migrate.HEAD)
        assert held[worker] == Granted(worker, Role.WORKER, ("here", "there"), migrate.HEAD)
        for user in (worker, trainer, auditor, late):
            revoke(restored.url, user)
        assert roles(restored.url).granted == ()
