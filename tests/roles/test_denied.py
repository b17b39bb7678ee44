"""Whatever a role must not do is tried by SQL: each statement is denied, or meets no row, and changes nothing."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import asyncpg
import pytest

from tests.roles.secured import Secured, secured_database
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.postgres import Server, fetch
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.roles.granting import grant
from tokencustody.roles.roles import OPENING, SECURED
from tokencustody.states import Role

TOKENS = [918273, 645546, 736251]
LOG_PROBS = [-0.123456789, -1.987654321, -2.5]
DENIED = "42501"
TOKEN_DATA = {
    ("entries", "payload"),
    ("staged_calls", "payload"),
    ("staged_calls", "extras"),
    ("staged_attachments", "data"),
}


@dataclass(frozen=True)
class Places:
    """A database with the same rollouts in two runs, and the users who hold roles in it.

    The worker and the trainer are of the run `here`; the chief is a trainer of all runs. The new ones are of a run
    that holds nothing yet.
    """

    database: Secured
    worker: str
    trainer: str
    chief: str
    auditor: str
    new_worker: str
    new_trainer: str

    def url_of(self, user: str) -> str:
        return self.database.url_as(getattr(self, user))

    def content(self) -> str:
        """Return a digest of every row, policy, privilege and table."""
        everything = [
            *(f"SELECT * FROM {table}" for table in (*(t.name for t in SECURED), *OPENING)),
            "SELECT polname, polroles::text, pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid),"
            " obj_description(oid, 'pg_policy') FROM pg_policy",
            "SELECT relname, relacl::text, relrowsecurity, relowner FROM pg_class WHERE relnamespace >= 2200",
            "SELECT attrelid::regclass::text, attname, attacl::text FROM pg_attribute WHERE attacl IS NOT NULL",
        ]
        digests = ", ".join(
            f"(SELECT md5(string_agg(r::text, '' ORDER BY r::text)) FROM ({each}) AS r)"
            for each in everything
        )
        return str(fetch(self.database.admin_url, f"SELECT concat_ws(' ', {digests})")[0][0])


async def fill(url: str, run: str) -> None:
    """Make a rollout in each state, named by it, with a call, intents, ledger and staged rows; `clean` is complete."""
    async with open_store(url, run=run) as store:
        for rollout in ("open", "frozen", "retired", "marked"):
            await store.sink.put(make_entry(rollout, "call-1", generation=TOKENS, log_probs=LOG_PROBS))
            await store.sink.begin_call(rollout, "call-2")
            await store.sink.refuse_call(rollout, model_call_id="call-3", code="busy")
            await store.lineage.record(make_commit(rollout, "call-1", tokens=TOKENS))
            await store.lineage.record_failure(rollout, "call-9", "lost")
            staged = stage("call-1", rollout=rollout, added=TOKENS, extras={"secret": TOKENS[0]}).snapshot
            await asyncio.to_thread(
                store.staging.stage, staged, attachments={"a": str(TOKENS), "b": bytes([1, 2])}
            )
        await store.sink.put(make_entry("clean", "call-1"))
        await store.source.freeze("clean")
        await store.sink.mark_incomplete("marked", "call-5")
        await store.source.freeze("frozen")
        await store.source.retire(["retired"])
    fetch(
        url,
        "INSERT INTO exports (run, rollout_id, export_id, snapshot_id, version, destination, manifest_sha256,"
        f" exported_at, written_by) VALUES ('{run}', 'retired', 'export', 's', 1, 'd', repeat('0', 64), now(), 'me')",
    )


@pytest.fixture(scope="module")
def places(postgres: Server) -> Iterator[Places]:
    names = ("worker", "trainer", "chief", "auditor", "new_worker", "new_trainer")
    with secured_database(postgres, *names) as (database, users):
        worker, trainer, chief, auditor, new_worker, new_trainer = users
        for run in ("here", "other"):
            asyncio.run(fill(database.url, run))
        grant(database.url, Role.WORKER, worker, ["here"])
        grant(database.url, Role.TRAINER, trainer, ["here"])
        grant(database.url, Role.TRAINER, chief)
        grant(database.url, Role.AUDITOR, auditor)
        grant(database.url, Role.WORKER, new_worker, ["empty"])
        grant(database.url, Role.TRAINER, new_trainer, ["empty"])
        fetch(database.url, "ANALYZE")
        yield Places(database, *users)


def attempt(url: str, statement: str) -> str:
    """Return the SQLSTATE with which a statement is refused, or the status that it ends with; it is rolled back."""

    async def run() -> str:
        connection = await asyncpg.connect(url, ssl=False)
        try:
            transaction = connection.transaction()
            await transaction.start()
            try:
                return await connection.execute(statement)
            except asyncpg.PostgresError as exc:
                return str(exc.sqlstate)
            finally:
                await transaction.rollback()
        finally:
            await connection.close()

    return asyncio.run(run())


def columns(table: str) -> list[str]:
    return next(list(t.c.keys()) for t in SECURED if t.name == table)


def copied(table: str, where: str = "run = 'here'", **changes: str) -> str:
    """Return an INSERT of rows as they are but for the SQL in `changes`."""
    names = columns(table)
    values = ", ".join(changes.get(name, name) for name in names)
    return f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table} WHERE {where}"


TABLES = [table.name for table in SECURED]
FENCE = (
    "INSERT INTO fences (run, rollout_id, state, version, snapshot_id, incomplete, opened_at, frozen_at, retired_at)"
    " VALUES ('{run}', 'new', '{state}', {version}, {snapshot}, {incomplete}, now(), {frozen}, {retired})"
)
OPEN = {
    "run": "here",
    "state": "open",
    "version": 0,
    "snapshot": "NULL",
    "incomplete": "false",
    "frozen": "NULL",
    "retired": "NULL",
}
VERSION = (
    "INSERT INTO snapshot_versions (run, rollout_id, version, event, event_id, model_call_id, recorded_at, written_by)"
    " VALUES ('here', '{rollout}', {version}, '{event}', 'id', '', now(), 'me')"
)
FAILURE = (
    "INSERT INTO failures (run, rollout_id, version, kind, model_call_id, differing_fields, recorded_at, written_by)"
    " VALUES ('here', '{rollout}', {version}, '{kind}', '', '', now(), 'me')"
)
ADVANCE = "UPDATE fences SET version = version + {by}, {changes} WHERE rollout_id = '{rollout}'"

# What neither a worker, nor a trainer, nor an auditor may do.
NOBODY = [
    *(f"TRUNCATE {table} CASCADE" for table in (*TABLES, *OPENING)),
    *(f"DELETE FROM {table}" for table in ("fences", "snapshot_versions", "exports", *OPENING)),
    *(f"UPDATE {table} SET run = 'other'" for table in TABLES),
    *(f"UPDATE {table} SET rollout_id = 'stolen'" for table in TABLES),
    *(
        f"UPDATE {table} SET model_call_id = 'stolen'"
        for table in TABLES
        if "model_call_id" in columns(table)
    ),
    *(f"UPDATE {table} SET written_by = 'me'" for table in TABLES if "written_by" in columns(table)),
    *(copied(table, run="'new'") for table in ("entries", "intents", "ledger_calls", "staged_calls")),
    *(copied(table, "run = 'other'") for table in ("entries", "intents", "ledger_calls", "staged_calls")),
    *(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE" for table in ("fences", "snapshot_versions", "exports")),
    *(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY" for table in TABLES),
    *(f"DROP TABLE {table} CASCADE" for table in TABLES),
    *(f"CREATE POLICY wide ON {table} USING (true)" for table in TABLES),
    "UPDATE entries SET payload = ''",
    "UPDATE entries SET payload_sha256 = repeat('0', 64)",
    "UPDATE ledger_calls SET response_id = 'x'",
    "UPDATE ledger_failures SET reason = 'x'",
    "UPDATE staged_calls SET payload = ''",
    "UPDATE staged_calls SET staged_at = now()",
    "UPDATE staged_attachments SET data = ''",
    "UPDATE failures SET kind = 'mark'",
    "UPDATE snapshot_versions SET event = 'open'",
    "UPDATE exports SET destination = 'x'",
    "UPDATE fences SET opened_at = now()",
    "UPDATE wire_schema SET version = version + 1",
    "UPDATE alembic_version SET version_num = 'x'",
    "INSERT INTO wire_schema VALUES ('x', 1)",
    "CREATE TABLE mine (x int)",
    "CREATE TABLE mine (run text, rollout_id text, FOREIGN KEY (run, rollout_id) REFERENCES fences)",
    "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE SCHEMA mine",
    "CREATE INDEX mine ON entries (payload)",
    "CREATE TRIGGER mine BEFORE INSERT ON entries EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "ALTER TABLE entries OWNER TO CURRENT_USER",
    "ALTER TABLE entries DROP CONSTRAINT fk_entries_fence",
    "ALTER ROLE CURRENT_USER BYPASSRLS",
    "SET LOCAL row_security = off; SELECT run FROM fences",
    "SET ROLE {owner}",
    "SET SESSION AUTHORIZATION {owner}",
    "SET LOCAL session_replication_role = replica",
    "GRANT {owner} TO CURRENT_USER",
    "REASSIGN OWNED BY {owner} TO CURRENT_USER",
    "COPY fences TO PROGRAM 'cat'",
    "COPY wire_schema FROM '/etc/passwd'",
    "SELECT pg_read_file('/etc/passwd')",
    "SELECT lo_import('/etc/passwd')",
    "SELECT * FROM pg_statistic",
    "SELECT * FROM pg_authid",
]
OTHERS = [
    *(f"SELECT run FROM {table} WHERE run = 'other'" for table in TABLES),
    *(f"SELECT run FROM {table} WHERE run <> 'here'" for table in TABLES),
    *(copied(table, run="'other'", rollout_id="'new'") for table in TABLES),
    "SELECT state FROM fences WHERE run = 'other' FOR UPDATE",
    "SELECT state FROM fences WHERE run = 'other' FOR SHARE",
    "SELECT run FROM staged_calls WHERE run = 'other' FOR UPDATE",
    "UPDATE fences SET version = version + 1, incomplete = true WHERE run = 'other'",
    FENCE.format(**OPEN | {"run": "other"}),
]
UNCHANGEABLE = [
    ADVANCE.format(by=1, changes="incomplete = false", rollout="marked"),
    ADVANCE.format(by=0, changes="incomplete = true", rollout="marked"),
    ADVANCE.format(by=2, changes="incomplete = true", rollout="open"),
    ADVANCE.format(by=-1, changes="incomplete = true", rollout="open"),
    ADVANCE.format(by=1, changes="incomplete = true", rollout="retired"),
    *(
        FENCE.format(**OPEN | changed)
        for changed in (
            {"state": "frozen", "snapshot": "'s'"},
            {"state": "retired"},
            {"version": 1},
            {"snapshot": "'s'"},
            {"incomplete": "true"},
            {"frozen": "now()"},
            {"retired": "now()"},
        )
    ),
    FENCE.format(**OPEN).replace("'new'", "'frozen'")
    + " ON CONFLICT (run, rollout_id) DO UPDATE SET version = 0, incomplete = false",
    # History: an event that did not happen, or that happened to another version.
    VERSION.format(rollout="open", version=2, event="mark"),
    VERSION.format(rollout="open", version=0, event="mark"),
    VERSION.format(rollout="open", version=1, event="open"),
    VERSION.format(rollout="marked", version=7, event="mark"),
    FAILURE.format(rollout="open", version=1, kind="mark"),
    FAILURE.format(rollout="marked", version=7, kind="mark"),
]
WORKER = [
    *NOBODY,
    *OTHERS,
    *UNCHANGEABLE,
    *(f"DELETE FROM {table}" for table in TABLES),
    copied("exports", export_id="'mine'"),
    "LOCK TABLE entries IN ACCESS EXCLUSIVE MODE",
    "UPDATE fences SET state = 'frozen', snapshot_id = 's' WHERE rollout_id = 'open'",
    "UPDATE fences SET state = 'retired' WHERE rollout_id = 'open'",
    "UPDATE fences SET state = 'open' WHERE rollout_id = 'frozen'",
    "UPDATE fences SET snapshot_id = NULL",
    "UPDATE fences SET frozen_at = NULL",
    "UPDATE fences SET retired_at = NULL",
    ADVANCE.format(by=1, changes="incomplete = incomplete", rollout="retired"),
    *(VERSION.format(rollout="frozen", version=3, event=event) for event in ("freeze", "drop", "retire")),
    *(copied("entries", f"rollout_id = '{rollout}'", model_call_id="'late'") for rollout in ("frozen",)),
    copied("entries", "rollout_id = 'open'", model_call_id="'late'", rollout_id="'retired'"),
    copied("entries", "rollout_id = 'open'")
    + " ON CONFLICT (run, rollout_id, model_call_id) DO UPDATE SET payload = ''",
    copied("intents", "rollout_id = 'frozen' AND refusal_code IS NULL", model_call_id="'late'"),
    copied("intents", "rollout_id = 'open' AND refusal_code IS NOT NULL", model_call_id="'late'"),
    "UPDATE intents SET refusal_code = 'x', refused_at = now() WHERE refusal_code IS NOT NULL",
    "UPDATE intents SET refusal_code = NULL, refused_at = NULL WHERE rollout_id = 'open' AND model_call_id = 'call-3'",
    "UPDATE intents SET refusal_code = 'x', refused_at = now() WHERE rollout_id = 'frozen' AND refusal_code IS NULL",
    copied("ledger_calls", "rollout_id = 'open'", rollout_id="'retired'"),
    copied("ledger_failures", "rollout_id = 'open'", rollout_id="'retired'"),
]
TRAINER = [
    *NOBODY,
    *OTHERS,
    "SELECT run FROM exports WHERE run = 'other'",
    *UNCHANGEABLE,
    *(
        copied(table, "rollout_id = 'open'", model_call_id="'mine'")
        for table in ("entries", "intents", "ledger_calls", "ledger_failures", "staged_calls")
    ),
    copied("staged_attachments", "rollout_id = 'open'", name="'mine'"),
    "UPDATE intents SET refusal_code = 'x', refused_at = now()",
    *(
        f"DELETE FROM {table} WHERE run = 'other'"
        for table in ("entries", "intents", "failures", "ledger_calls", "staged_calls", "staged_attachments")
    ),
    ADVANCE.format(by=1, changes="state = 'open', incomplete = true", rollout="frozen"),
    ADVANCE.format(by=1, changes="state = 'open', incomplete = true", rollout="retired"),
    ADVANCE.format(by=1, changes="state = 'frozen', snapshot_id = 's'", rollout="retired"),
    ADVANCE.format(by=1, changes="state = 'frozen', snapshot_id = 's', incomplete = false", rollout="marked"),
    ADVANCE.format(by=1, changes="incomplete = false", rollout="open"),
    ADVANCE.format(by=2, changes="state = 'retired'", rollout="frozen"),
    *(VERSION.format(rollout="marked", version=2, event=event) for event in ("conflict", "refusal")),
    VERSION.format(rollout="frozen", version=2, event="retire"),
    FAILURE.format(rollout="marked", version=2, kind="conflict"),
]
AUDITOR = [
    *NOBODY,
    *(f"DELETE FROM {table}" for table in TABLES),
    *(copied(table) for table in TABLES if table not in ("entries", "staged_calls", "staged_attachments")),
    *(f"SELECT run FROM {table} FOR UPDATE" for table in TABLES),
    *(f"SELECT run FROM {table} FOR KEY SHARE" for table in TABLES),
    *(f"SELECT {column} FROM {table}" for table, column in sorted(TOKEN_DATA)),
    *(f"SELECT length({column}) FROM {table}" for table, column in sorted(TOKEN_DATA)),
    *(f"SELECT run FROM {table} WHERE {column} <> ''" for table, column in sorted(TOKEN_DATA)),
    *(f"SELECT run FROM {table} ORDER BY {column}" for table, column in sorted(TOKEN_DATA)),
    *(f"EXPLAIN SELECT {column} FROM {table}" for table, column in sorted(TOKEN_DATA)),
    *(
        f"SELECT tablename FROM pg_stats WHERE tablename = '{table}' AND attname = '{column}'"
        for table, column in sorted(TOKEN_DATA)
    ),
    *(
        statement.format(table=table)
        for table in ("entries", "staged_calls", "staged_attachments")
        for statement in (
            "TABLE {table}",
            "SELECT {table} FROM {table}",
            "SELECT row_to_json(t) FROM {table} AS t",
            "COPY {table} TO STDOUT",
            "SELECT query_to_xml('SELECT * FROM {table}', true, false, '')",
            "SELECT table_to_xml('{table}', true, false, '')",
        )
    ),
    "UPDATE fences SET version = version + 1",
]
ALL = {"worker": WORKER, "trainer": TRAINER, "auditor": AUDITOR}


def is_refused(outcome: str) -> bool:
    return outcome == DENIED or outcome.split()[-1] == "0"


@pytest.mark.parametrize("user", ALL)
def test_what_a_role_must_not_do_is_denied_or_meets_no_row(places: Places, user: str) -> None:
    before = places.content()
    url = places.url_of(user)
    tried = {
        statement: attempt(url, statement.replace("{owner}", places.database.owner))
        for statement in dict.fromkeys(ALL[user])
    }
    assert {statement: outcome for statement, outcome in tried.items() if not is_refused(outcome)} == {}
    assert places.content() == before


def test_each_statement_does_something_for_somebody_who_may(places: Places) -> None:
    url = places.database.admin_url
    statements = dict.fromkeys(statement for of_role in ALL.values() for statement in of_role)
    tried = {each: attempt(url, each.replace("{owner}", places.database.owner)) for each in statements}
    assert [each for each, outcome in tried.items() if is_refused(outcome)] == []


CAPTURED = {"entries", "intents", "failures", "ledger_calls", "ledger_failures"}
STAGED = {"staged_calls", "staged_attachments"}
# What each may insert and delete, by table, and which columns it may update.
INSERTED = {
    "worker": {"fences", "snapshot_versions", *CAPTURED, *STAGED},
    "trainer": {"fences", "snapshot_versions", "failures", "exports"},
    "auditor": set(),
}
DELETED = {"worker": set(), "trainer": {*CAPTURED, *STAGED}, "auditor": set()}
UPDATED = {
    "worker": {
        "fences.version",
        "fences.incomplete",
        "intents.refusal_code",
        "intents.refused_at",
        "staged_calls.staged_at",
    },
    "trainer": {
        "fences.state",
        "fences.version",
        "fences.snapshot_id",
        "fences.incomplete",
        "fences.frozen_at",
        "fences.retired_at",
        "staged_calls.staged_at",
    },
    "auditor": set(),
}


@pytest.mark.parametrize("user", ALL)
def test_a_role_may_insert_update_and_delete_no_more_than_is_written_here(places: Places, user: str) -> None:
    def may(privilege: str) -> set[str]:
        tables = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v')"
        found = fetch(places.url_of(user), f"{tables} AND has_table_privilege(oid, '{privilege}')")
        return {row[0] for row in found}

    assert (may("INSERT"), may("DELETE")) == (INSERTED[user], DELETED[user])
    assert may("UPDATE") | may("TRUNCATE") | may("REFERENCES") | may("TRIGGER") == set()
    updatable = fetch(
        places.url_of(user),
        "SELECT c.relname || '.' || a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
        " WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v') AND attnum > 0"
        " AND (has_column_privilege(c.oid, attnum, 'UPDATE') OR has_column_privilege(c.oid, attnum, 'REFERENCES'))",
    )
    assert {row[0] for row in updatable} == UPDATED[user]


def test_a_statement_without_a_condition_meets_no_row_of_another_run(places: Places) -> None:
    # Without one, and without reading a column, only the policies of its own command stand before the rows.
    for table in DELETED["trainer"]:
        assert attempt(places.url_of("new_trainer"), f"DELETE FROM {table}") == "DELETE 0"
    for user in ("new_worker", "new_trainer"):
        assert attempt(places.url_of(user), "UPDATE fences SET version = 1, incomplete = true") == "UPDATE 0"
        assert attempt(places.url_of(user), "UPDATE staged_calls SET staged_at = now()") == "UPDATE 0"
    refusal = "UPDATE intents SET refusal_code = 'x', refused_at = now()"
    assert attempt(places.url_of("new_worker"), refusal) == "UPDATE 0"


@pytest.mark.parametrize("user", ["worker", "trainer"])
@pytest.mark.parametrize("ending", ["", " ON CONFLICT DO NOTHING", " RETURNING state"])
def test_a_key_of_another_run_is_denied_whether_it_exists_or_not(
    places: Places, user: str, ending: str
) -> None:
    url = places.url_of(user)
    for rollout in ("open", "frozen", "retired", "unknown"):
        fence = FENCE.format(**OPEN | {"run": "other"}).replace("'new'", f"'{rollout}'")
        assert attempt(url, fence + ending) == DENIED


def test_a_worker_sees_every_row_of_its_run_and_an_auditor_those_of_all(places: Places) -> None:
    for table in TABLES:
        count = f"SELECT run FROM {table} GROUP BY run ORDER BY run"
        for user, runs in (("worker", ["here"]), ("trainer", ["here"]), ("chief", ["here", "other"])):
            assert [row[0] for row in fetch(places.url_of(user), count)] == runs
        assert [row[0] for row in fetch(places.url_of("auditor"), count)] == ["here", "other"]


def test_an_auditor_reads_every_column_but_those_with_token_data(places: Places) -> None:
    for table in TABLES:
        readable = [column for column in columns(table) if (table, column) not in TOKEN_DATA]
        assert fetch(places.url_of("auditor"), f"SELECT {', '.join(readable)} FROM {table}")


def test_nothing_that_an_auditor_can_read_holds_a_token_or_a_log_probability(places: Places) -> None:
    url = places.url_of("auditor")
    found = fetch(
        url,
        "SELECT c.relname, string_agg(a.attname, ', ') AS columns FROM pg_class c JOIN pg_attribute a"
        " ON a.attrelid = c.oid WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'v')"
        " AND a.attnum > 0 AND has_column_privilege(c.oid, a.attnum, 'SELECT') GROUP BY 1",
    )
    assert {row["relname"] for row in found} >= {*TABLES, *OPENING}
    text = ""
    for row in found:
        values = fetch(url, f"SELECT t::text FROM (SELECT {row['columns']} FROM {row['relname']}) AS t")
        text += "".join(value[0] for value in values)
    for secret in secrets_of(TOKENS, LOG_PROBS):
        assert secret not in text


def secrets_of(tokens: list[int], log_probs: list[float]) -> list[str]:
    """Return how token ids and log probabilities could be seen: in decimals, or packed, in hexadecimals."""
    packed = [token.to_bytes(width, "little").hex() for token in tokens for width in (4, 8)]
    return [
        *map(str, tokens),
        *map(str, log_probs),
        *packed,
        *(struct.pack("<d", p).hex() for p in log_probs),
    ]


def test_what_an_auditor_must_not_read_holds_the_secrets_that_are_looked_for(places: Places) -> None:
    (payload,) = fetch(
        places.database.url, "SELECT encode(payload, 'hex') FROM entries WHERE run = 'here' LIMIT 1"
    )[0]
    assert sum(secret in payload for secret in secrets_of(TOKENS, LOG_PROBS)) >= len(TOKENS + LOG_PROBS)


def test_the_views_are_for_those_who_may_see_every_run(places: Places) -> None:
    views = [
        row[0]
        for row in fetch(places.database.url, "SELECT viewname FROM pg_views WHERE schemaname = 'public'")
    ]
    assert len(views) >= 10
    for view in views:
        for user in ("auditor", "chief"):
            assert attempt(places.url_of(user), f"SELECT * FROM {view}").startswith("SELECT")
        for user in ("worker", "trainer"):
            assert attempt(places.url_of(user), f"SELECT * FROM {view}") == DENIED
