"""`tokencustody db grant`, `db revoke` and `db roles`: what they change, what they refuse, and what they say."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import asyncpg
import pytest

from tests.roles.secured import PASSWORD, Secured, secured_database, server_user
from tests.support.postgres import Server, fetch
from tokencustody import open_store
from tokencustody.cli import main
from tokencustody.errors import RoleError
from tokencustody.roles import granting
from tokencustody.roles.granting import grant, revoke
from tokencustody.roles.roles import ACCESS, SECURED, identifier
from tokencustody.schema import migrate
from tokencustody.states import Role


class Ended:
    """How a command ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Db = Callable[..., Ended]


@pytest.fixture
def db(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secured: Secured) -> Db:
    """Run `tokencustody db`, as the owner of the database unless told the URL."""

    def run(command: str, *names: str, url: str | None = None) -> Ended:
        arguments = [*shlex.split(command), *names, "--url", url or secured.url]
        monkeypatch.setattr(sys, "argv", ["tokencustody", "db", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        return Ended(exited.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def server_users(postgres: Server) -> Iterator[tuple[Secured, list[str]]]:
    with secured_database(postgres, 'we"ird; DROP TABLE fences', "bob") as found:
        yield found


@pytest.fixture
def secured(server_users: tuple[Secured, list[str]]) -> Iterator[Secured]:
    """A database in which nobody was granted anything."""
    database, users = server_users
    before = state(database)
    yield database
    if state(database) != before:
        for user in users:
            revoke(database.url, user)
        assert state(database) == before


@pytest.fixture
def alice(server_users: tuple[Secured, list[str]]) -> str:
    """A user of the server with a name that must be quoted."""
    return server_users[1][0]


@pytest.fixture
def bob(server_users: tuple[Secured, list[str]]) -> str:
    return server_users[1][1]


def state(database: Secured) -> list[object]:
    """Return what a grant changes: policies, row security, and privileges that are not the owner's."""
    statements = (
        "SELECT polname, polrelid::regclass::text, pg_get_expr(polqual, polrelid),"
        " pg_get_expr(polwithcheck, polrelid), obj_description(oid, 'pg_policy') FROM pg_policy ORDER BY 2, 1",
        "SELECT relname FROM pg_class WHERE relrowsecurity ORDER BY 1",
        "SELECT c.relname, a.grantee, a.privilege_type FROM pg_class c, aclexplode(c.relacl) a"
        " WHERE a.grantee <> c.relowner AND c.relnamespace = 'public'::regnamespace ORDER BY 1, 2, 3",
        "SELECT attrelid::regclass::text, attname, g.grantee, g.privilege_type FROM pg_attribute a,"
        " aclexplode(attacl) g WHERE attnum > 0 ORDER BY 1, 2, 3, 4",
    )
    return [[tuple(row) for row in fetch(database.admin_url, each)] for each in statements]


def listed(db: Db) -> dict[str, dict[str, object]]:
    found = json.loads(db("roles --json").out)
    return {each["name"]: each for each in found["granted"]}


def test_granting_again_changes_nothing_and_says_the_same(db: Db, secured: Secured, alice: str) -> None:
    first = db("grant --role worker --run run-1", alice)
    granted = state(secured)
    assert (first.code, first.err) == (0, "")
    assert first.out.endswith(f"{alice} is worker of run-1\n")
    again = db("grant --role worker --run run-1", alice)
    assert (again.code, again.out) == (first.code, first.out)
    assert state(secured) == granted


def test_runs_are_granted_besides_those_before_and_revoked_one_by_one(db: Db, alice: str) -> None:
    db("grant --role worker --run run-1 --run run-2", alice)
    assert db("grant --role worker --run run-3", alice).out.endswith("worker of run-1, run-2, run-3\n")
    assert db("revoke --run run-2", alice).out.endswith("worker of run-1, run-3\n")
    assert listed(db)[alice]["runs"] == ["run-1", "run-3"]
    refused = db("revoke --run run-2", alice)
    assert refused.code == 1
    assert "not in particular of run-2" in refused.err
    assert db("revoke --run run-1 --run run-3", alice).out.endswith("has no role any more\n")
    assert listed(db) == {}


def test_roles_are_listed_for_people_and_for_scripts(db: Db, secured: Secured, alice: str, bob: str) -> None:
    assert "No roles were granted." in db("roles").out
    db("grant --role worker --run run-1", alice)
    db("grant --role auditor", bob)
    ended = db("roles")
    assert ended.code == 0
    assert f"owned by {secured.owner}, row security on" in ended.out
    assert [line.split()[-2:] for line in ended.out.splitlines()[2:]] == [["as", "granted"]] * 2
    found = json.loads(db("roles --json").out)
    assert (found["owner"], found["row_security"], found["others"]) == (secured.owner, True, [])
    assert [(each["name"], each["role"], each["runs"]) for each in found["granted"]] == [
        (bob, "auditor", None),
        (alice, "worker", ["run-1"]),
    ]


def test_the_last_revocation_turns_row_security_off_again(
    db: Db, secured: Secured, alice: str, bob: str
) -> None:
    before = state(secured)
    db("grant --role trainer", alice)
    db("grant --role auditor", bob)
    assert state(secured)[1] == [(name,) for name in sorted(table.name for table in SECURED)]
    db("revoke", alice)
    assert json.loads(db("roles --json").out)["row_security"]
    db("revoke", bob)
    assert state(secured) == before
    assert db("revoke", bob).out.endswith("has nothing to revoke\n")


@pytest.mark.parametrize("options", ["worker --run run-1", "trainer", "trainer --run run-1", "auditor"])
def test_the_sql_that_is_printed_does_what_the_command_does_and_printing_changes_nothing(
    db: Db, secured: Secured, alice: str, options: str
) -> None:
    before = state(secured)
    printed = db(f"grant --print --role {options}", alice).out
    assert state(secured) == before
    fetch_script(secured.url, printed)
    by_hand = state(secured)
    unsaid = db("revoke --print", alice).out
    assert state(secured) == by_hand
    fetch_script(secured.url, unsaid)
    assert state(secured) == before
    db(f"grant --role {options}", alice)
    assert state(secured) == by_hand


def fetch_script(url: str, script: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(url, ssl=False)
        try:
            # As psql elsewhere would: the statements do not lean on the search path.
            await connection.execute("SET search_path = pg_catalog")
            await connection.execute(script)
        finally:
            await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("grant --role worker", "--run"),
        ("grant --role auditor --run run-1", "--run"),
        ("grant --role worker --run a/b", "--run"),
        ("grant --role owner", "--role"),
        ("revoke --run ''", "--run"),
    ],
)
def test_wrong_usage_ends_with_exit_code_2_and_names_the_option(
    db: Db, alice: str, command: str, hint: str
) -> None:
    ended = db(command, alice)
    assert ended.code == 2
    assert hint in ended.err


def refusal(db: Db, command: str, *names: str, url: str | None = None) -> str:
    ended = db(command, *names, url=url)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    assert PASSWORD not in ended.err
    return ended.err


@pytest.mark.parametrize("command", ["grant --role auditor x", "revoke x", "roles"])
def test_sqlite_has_no_roles(db: Db, sqlite_url: str, command: str) -> None:
    assert "is SQLite, which has no roles" in refusal(db, command, url=sqlite_url)


@pytest.mark.parametrize("command", ["grant --role auditor", "revoke"])
def test_a_name_that_the_server_does_not_know_comes_with_the_statement_that_creates_it(
    db: Db, command: str
) -> None:
    assert '`CREATE ROLE "no""body" LOGIN;`' in refusal(db, command, 'no"body')


@pytest.mark.parametrize("command", ["grant --role auditor", "revoke"])
def test_only_the_owner_grants_and_revokes_and_is_named(
    db: Db, secured: Secured, alice: str, bob: str, command: str
) -> None:
    db("grant --role auditor", alice)
    said = refusal(db, command, bob, url=secured.url_as(alice))
    assert f"only {secured.owner}, who owns the tables" in said
    assert f"connect as {secured.owner}" in said


def test_the_roles_are_listed_for_everybody_who_may_open_a_store(
    db: Db, secured: Secured, alice: str
) -> None:
    db("grant --role worker --run run-1", alice)
    assert db("roles", url=secured.url_as(alice)).code == 0


def test_no_role_is_granted_to_whom_it_would_not_bind(db: Db, secured: Secured, postgres: Server) -> None:
    assert "is the owner of the tables" in refusal(db, "grant --role auditor", secured.owner)
    powers = {
        "LOGIN SUPERUSER": "a superuser",
        "LOGIN BYPASSRLS": "allowed to bypass row security",
        "LOGIN CREATEROLE": "allowed to create roles",
        "LOGIN REPLICATION": "allowed to replicate",
        "LOGIN IN ROLE pg_read_server_files": "a member of pg_read_server_files",
        f"LOGIN IN ROLE {secured.owner}": f"a member of {secured.owner}, their owner",
    }
    for options, why in powers.items():
        with server_user(postgres, "mighty", options) as name:
            assert f"{name} is {why}" in refusal(db, "grant --role auditor", name)
            if "IN ROLE" not in options:
                with server_user(postgres, "member", f"LOGIN IN ROLE {name}") as member:
                    assert f"{member} is a member of {name}" in refusal(db, "grant --role auditor", member)


def test_a_role_is_not_changed_or_narrowed_before_it_is_revoked(db: Db, alice: str) -> None:
    db("grant --role trainer", alice)
    assert "is trainer already" in refusal(db, "grant --role worker --run run-1", alice)
    assert "trainer of all runs already" in refusal(db, "grant --role trainer --run run-1", alice)
    assert "of all runs, not in particular of run-1" in refusal(db, "revoke --run run-1", alice)


def test_roles_that_were_given_privileges_by_hand_are_named_before_they_lose_sight_of_rows(
    db: Db, secured: Secured, alice: str, bob: str
) -> None:
    fetch(secured.url, f"GRANT SELECT (run) ON fences TO {bob}")
    # Nobody else would lose anything.
    assert db("grant --role auditor --print", bob).code == 0
    said = refusal(db, "grant --role worker --run run-1", alice)
    assert f"would leave {bob}, who hold privileges" in said
    assert "--force" in said
    forced = db("grant --force --role worker --run run-1", alice)
    assert forced.code == 0
    assert f"note: {bob} hold privileges that were granted by hand" in forced.err
    assert json.loads(db("roles --json").out)["others"] == [bob]
    # Off again, it would show them every row.
    assert "row security stays on" in db("revoke", alice).err
    assert state(secured)[1] != []
    db("grant --role auditor", bob)


def test_privileges_that_come_from_elsewhere_are_found_and_nothing_is_granted(
    db: Db, secured: Secured, alice: str, bob: str
) -> None:
    fetch(secured.url, "GRANT DELETE ON entries TO PUBLIC")
    try:
        before = state(secured)
        said = refusal(db, "grant --force --role worker --run run-1", alice)
        assert "more than a worker may" in said
        assert "DELETE on entries" in said
        assert state(secured) == before
    finally:
        fetch(secured.url, "REVOKE DELETE ON entries FROM PUBLIC")
    fetch(secured.admin_url, f"GRANT pg_read_all_data TO {identifier(alice)}")
    try:
        assert "SELECT on entries (payload)" in refusal(db, "grant --role auditor", alice)
    finally:
        fetch(secured.admin_url, f"REVOKE pg_read_all_data FROM {identifier(alice)}")
    db("grant --role worker --run run-1", alice)
    fetch(secured.admin_url, f"GRANT {identifier(alice)} TO {bob}")
    try:
        assert f"is a member of {alice}" in refusal(db, "grant --role auditor", bob)
    finally:
        fetch(secured.admin_url, f"REVOKE {identifier(alice)} FROM {bob}")


def test_a_policy_of_another_making_that_widens_what_a_role_sees_is_refused(
    db: Db, secured: Secured, alice: str
) -> None:
    fetch(secured.url, "CREATE POLICY wide ON entries USING (true)")
    try:
        assert "wide on entries" in refusal(db, "grant --role worker --run run-1", alice)
    finally:
        fetch(secured.url, "DROP POLICY wide ON entries")


def test_a_login_has_what_its_group_was_granted(db: Db, secured: Secured, postgres: Server) -> None:
    with ExitStack() as stack:
        group = stack.enter_context(server_user(postgres, "group", "NOLOGIN"))
        member = stack.enter_context(server_user(postgres, "member", f"LOGIN IN ROLE {group}"))
        assert db("grant --role worker --run run-1", group).code == 0
        stack.callback(revoke, secured.url, group)

        async def begin(run: str) -> None:
            async with open_store(secured.url_as(member), run=run) as store:
                await store.sink.begin_call("rollout-1", "call-1")

        asyncio.run(begin("run-1"))
        with pytest.raises(ConnectionError):
            asyncio.run(begin("run-2"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("COMMENT ON POLICY {policy} ON fences IS '{older}'", "was granted at 0003_prefix_sharing"),
        ("REVOKE INSERT ON entries FROM {alice}", "lacks INSERT on entries"),
        ("REVOKE SELECT ON wire_schema FROM {alice}", "lacks SELECT on wire_schema"),
        ("GRANT DELETE ON entries TO {alice}", "has besides DELETE on entries"),
        ("GRANT UPDATE (state) ON fences TO {alice}", "has besides UPDATE on fences (state)"),
        ("ALTER TABLE exports DISABLE ROW LEVEL SECURITY", "row security was turned off"),
    ],
)
def test_what_is_not_as_it_was_granted_is_said_with_exit_code_1_and_mended_by_granting_again(
    db: Db, secured: Secured, alice: str, change: str, problem: str
) -> None:
    db("grant --role worker --run run-1", alice)
    granted = state(secured)
    policy = fetch(secured.url, "SELECT polname FROM pg_policy WHERE polcmd = 'r' LIMIT 1")[0][0]
    older = json.dumps({"role": "worker", "runs": ["run-1"], "revision": "0003_prefix_sharing"})
    fetch(
        secured.url,
        change.replace("{alice}", identifier(alice)).replace("{policy}", policy).replace("{older}", older),
    )
    ended = db("roles")
    assert ended.code == 1
    assert problem in ended.out
    assert any(problem in each for each in listed(db)[alice]["problems"])  # type: ignore[attr-defined]
    assert db("grant --role worker --run run-1", alice).code == 0
    assert state(secured) == granted


def test_after_an_upgrade_a_role_is_brought_up_to_date_by_granting_it_again(
    db: Db, secured: Secured, alice: str
) -> None:
    db("grant --role trainer --run run-1", alice)
    granted = state(secured)
    migrate.downgrade(secured.url, "0003_prefix_sharing")
    migrate.upgrade(secured.url)
    ended = db("roles")
    assert ended.code == 1
    assert "SELECT on exports" in ended.out
    assert db("grant --role trainer --run run-1", alice).code == 0
    assert db("roles").code == 0
    assert state(secured) == granted


def test_a_policy_whose_record_was_changed_is_named(db: Db, secured: Secured, alice: str) -> None:
    db("grant --role worker --run run-1", alice)
    policy = fetch(secured.url, "SELECT polname FROM pg_policy WHERE polcmd = 'r' LIMIT 1")[0][0]
    fetch(secured.url, f"COMMENT ON POLICY {policy} ON fences IS 'mine'")
    try:
        assert f"the comment of the policy of {alice} on the table fences" in refusal(db, "roles")
    finally:
        fetch(secured.url, f"COMMENT ON POLICY {policy} ON fences IS NULL")
    assert json.loads(db("roles --json").out)["others"] == [alice]


def test_a_grant_that_cannot_have_the_tables_gives_up_soon_and_changes_nothing(
    secured: Secured, alice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granting, "_LONGEST_WAIT", 0.1)
    before = state(secured)

    async def read_meanwhile() -> None:
        connection = await asyncpg.connect(secured.url, ssl=False)
        try:
            async with connection.transaction():
                await connection.fetch("SELECT run FROM ledger_calls")
                # When it does not give up, this does, and lets it go on.
                async with asyncio.timeout(30):
                    with pytest.raises(RoleError, match=r"in use by other transactions for 0\.1 seconds"):
                        await asyncio.to_thread(grant, secured.url, Role.WORKER, alice, ["run-1"])
        finally:
            await connection.close()

    asyncio.run(read_meanwhile())
    assert state(secured) == before


def test_a_database_that_must_be_upgraded_first_says_so(db: Db, empty_postgres_url: str, alice: str) -> None:
    assert "run `tokencustody db upgrade" in refusal(
        db, "grant --role auditor", alice, url=empty_postgres_url
    )
    migrate.upgrade(empty_postgres_url, "0004_audit")
    assert "run `tokencustody db upgrade" in refusal(db, "roles", url=empty_postgres_url)


def test_an_older_library_grants_nothing_in_a_database_that_it_only_works_with(
    db: Db, secured: Secured, alice: str
) -> None:
    assert db("grant --role worker --run run-1", alice).code == 0
    before = state(secured)
    fetch(secured.url, "UPDATE alembic_version SET version_num = '9999_later'")
    try:
        for asked in ("grant --role worker --run run-2", "revoke", "roles"):
            name = [] if asked == "roles" else [alice]
            assert refusal(db, asked, *name).strip().endswith("does not know: upgrade tokencustody")
    finally:
        fetch(secured.url, f"UPDATE alembic_version SET version_num = '{migrate.HEAD}'")
    assert state(secured) == before


def test_tables_in_a_schema_of_their_own_are_granted_with_the_schema(
    db: Db, secured: Secured, alice: str
) -> None:
    fetch(secured.admin_url, f"CREATE SCHEMA custody AUTHORIZATION {secured.owner}")
    path = "?options=-csearch_path%3Dcustody"
    try:
        migrate.upgrade(secured.url + path)
        assert db("grant --role worker --run run-1", alice, url=secured.url + path).code == 0

        async def begin() -> None:
            async with open_store(secured.url_as(alice) + path, run="run-1") as store:
                await store.sink.begin_call("rollout-1", "call-1")

        asyncio.run(begin())
        assert listed(db) == {}
        db("revoke", alice, url=secured.url + path)
        # Who owns it can drop whatever is in it.
        fetch(secured.admin_url, f"ALTER SCHEMA custody OWNER TO {identifier(alice)}")
        fetch(secured.admin_url, f"GRANT USAGE ON SCHEMA custody TO {secured.owner}")
        said = refusal(db, "grant --role auditor", alice, url=secured.url + path)
        assert "an owner of the schema" in said
    finally:
        fetch(secured.admin_url, "DROP SCHEMA custody CASCADE")


def test_a_role_that_may_not_connect_or_may_create_tables_is_noted_with_the_remedy(
    db: Db, secured: Secured, alice: str
) -> None:
    fetch(secured.admin_url, f'REVOKE CONNECT ON DATABASE "{secured.database}" FROM PUBLIC')
    fetch(secured.admin_url, "GRANT CREATE ON SCHEMA public TO PUBLIC")
    try:
        notes = db("grant --role worker --run run-1", alice).err
        assert f'GRANT CONNECT ON DATABASE "{secured.database}" TO {identifier(alice)};' in notes
        assert 'REVOKE CREATE ON SCHEMA "public" FROM PUBLIC;' in notes
    finally:
        fetch(secured.admin_url, f'GRANT CONNECT ON DATABASE "{secured.database}" TO PUBLIC')
        fetch(secured.admin_url, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")


def test_it_is_decided_for_every_table_what_each_role_may_do() -> None:
    undecided = {role: {t.name for t in SECURED} - {t.name for t in ACCESS[role]} for role in Role}
    assert undecided == {Role.WORKER: set(), Role.TRAINER: set(), Role.AUDITOR: set()}
