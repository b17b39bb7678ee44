"""The tables in code, the migrated database and the SQL text are one schema."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import Connection

from tests.support import probes
from tokencustody.database.url import parse_url
from tokencustody.schema import migrate, tables
from tokencustody.schema.migrations import views_0005

ROOT = Path(__file__).parents[2]

DRIFTS = [
    (
        "DROP INDEX ix_entries_continuation_fingerprint",
        [
            "missing: entries: INDEX ix_entries_continuation_fingerprint "
            "(run, rollout_id, continuation_fingerprint)"
        ],
    ),
    ("ALTER TABLE intents ADD COLUMN extra TEXT", ["unexpected: intents.extra TEXT"]),
    (
        "ALTER TABLE intents RENAME COLUMN begun_at TO began_at",
        ["missing: intents.begun_at *", "unexpected: intents.began_at *"],
    ),
    (
        "CREATE UNIQUE INDEX ix_extra ON fences (run, snapshot_id)",
        ["unexpected: fences: UNIQUE INDEX ix_extra (run, snapshot_id)"],
    ),
    (
        "DROP TABLE wire_schema;"
        "CREATE TABLE wire_schema (name TEXT, version TEXT NOT NULL,"
        " CONSTRAINT ck_other CHECK (version <> ''));"
        "INSERT INTO wire_schema VALUES ('token_entry', 1), ('token_digest', 1), ('fingerprint', 2),"
        " ('payload_codec', 1)",
        [
            "missing: wire_schema.name TEXT NOT NULL",
            "missing: wire_schema.version BIGINT NOT NULL",
            "missing: wire_schema: CHECK ck_wire_schema_version",
            "missing: wire_schema: PRIMARY KEY pk_wire_schema (name)",
            "unexpected: wire_schema.name TEXT",
            "unexpected: wire_schema.version TEXT NOT NULL",
            "unexpected: wire_schema: CHECK ck_other",
        ],
    ),
    (
        "DROP TABLE failures;"
        "CREATE TABLE failures (run TEXT NOT NULL, CONSTRAINT fk_failures_other FOREIGN KEY (run)"
        " REFERENCES wire_schema (name))",
        [
            "missing: failures: FOREIGN KEY fk_failures_fence (run, rollout_id) -> fences (run, rollout_id)",
            "unexpected: failures: FOREIGN KEY fk_failures_other (run) -> wire_schema (name)",
        ],
    ),
    ("DROP TABLE failures", ["missing: failures: PRIMARY KEY pk_failures (run, rollout_id, version)"]),
    ("DELETE FROM wire_schema WHERE name = 'fingerprint'", ["wire schema fingerprint: missing instead of 2"]),
    (
        "UPDATE wire_schema SET version = 3 WHERE name = 'fingerprint'",
        ["wire schema fingerprint: 3 instead of 2"],
    ),
    ("INSERT INTO wire_schema VALUES ('spare', 1)", ["wire schema spare: 1 instead of none"]),
    (
        "UPDATE alembic_version SET version_num = '9999_later'",
        [f"revision: 9999_later instead of {migrate.HEAD}"],
    ),
]


def create_all(url: str) -> None:
    migrate.in_transaction(parse_url(url), tables.metadata.create_all)


def test_migrated_database_equals_the_tables_in_code(new_database: Callable[[], str]) -> None:
    migrated, created = new_database(), new_database()
    migrate.upgrade(migrated)
    create_all(created)
    assert probes.catalogue(migrated) == probes.catalogue(created)
    assert migrate.check(migrated) == []


def test_alembic_finds_nothing_to_generate(empty_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        return list(compare_metadata(context, tables.metadata))

    migrate.upgrade(empty_url)
    assert migrate.in_transaction(parse_url(empty_url), differences) == []


@pytest.mark.parametrize(("drift", "expected"), DRIFTS, ids=[drift.split(";")[0] for drift, _ in DRIFTS])
def test_check_names_what_differs(migrated_url: str, dialect: str, drift: str, expected: list[str]) -> None:
    if dialect == "postgresql":
        drift = drift.replace("DROP TABLE failures", "DROP TABLE failures CASCADE")  # and the views over it
    probes.run_script(migrated_url, drift)
    problems = migrate.check(migrated_url)
    for line in expected:
        assert any(problem == line or problem.startswith(line.rstrip("*")) for problem in problems), problems


VIEWS = sorted(views_0005.views("sqlite"))


@pytest.mark.parametrize("view", VIEWS)
def test_check_names_a_view_that_is_missing_or_altered(migrated_url: str, dialect: str, view: str) -> None:
    probes.run_script(migrated_url, f"DROP VIEW {view}{' CASCADE' if dialect == 'postgresql' else ''}")
    assert f"missing: view {view}" in migrate.check(migrated_url)
    probes.run_script(migrated_url, f"CREATE VIEW {view} AS SELECT 1 AS run")
    assert {f"missing: view {view}", f"unexpected: view {view}, altered"} <= set(migrate.check(migrated_url))


def test_check_sees_that_a_view_was_replaced_under_its_comment(postgres_url: str) -> None:
    (definition,) = probes.rows(postgres_url, "SELECT pg_get_viewdef('audit_calls'::regclass)")[0]
    altered = f"{definition.rstrip(';')} WHERE run <> 'hidden'"
    probes.rows(postgres_url, f"CREATE OR REPLACE VIEW audit_calls AS {altered}")
    assert migrate.check(postgres_url) == [
        "missing: view audit_calls",
        "unexpected: view audit_calls, altered",
    ]


def test_check_trusts_the_wording_of_another_release_of_the_server_until_an_upgrade_makes_it_anew(
    postgres_url: str,
) -> None:
    before = probes.rows(postgres_url, "SELECT obj_description('audit_calls'::regclass)")
    probes.rows(postgres_url, "COMMENT ON VIEW audit_calls IS 'tokencustody 9 as it was worded then'")
    assert migrate.check(postgres_url) == []
    said: list[str] = []
    migrate.upgrade(postgres_url, progress=said.append)
    assert said == ["made anew: view audit_calls"]
    assert probes.rows(postgres_url, "SELECT obj_description('audit_calls'::regclass)") == before


def test_an_upgrade_makes_no_view_where_the_tables_are_not_as_they_should_be(
    migrated_url: str, dialect: str
) -> None:
    cascade = " CASCADE" if dialect == "postgresql" else ""
    probes.run_script(
        migrated_url, f"DROP VIEW audit_calls{cascade}; DROP INDEX ix_ledger_failures_model_call_id"
    )
    said: list[str] = []
    migrate.upgrade(migrated_url, progress=said.append)
    assert said == []
    assert "missing: view audit_calls" in migrate.check(migrated_url)


def test_check_takes_a_view_without_our_comment_for_altered(postgres_url: str) -> None:
    probes.rows(postgres_url, "COMMENT ON VIEW audit_calls IS 'mine'")
    assert migrate.check(postgres_url) == [
        "missing: view audit_calls",
        "unexpected: view audit_calls, altered",
    ]


def test_check_is_the_same_however_a_database_words_its_names(postgres_url: str) -> None:
    name = parse_url(postgres_url).display.rpartition("/")[2]
    probes.rows(postgres_url, f'ALTER DATABASE "{name}" SET quote_all_identifiers = on')
    assert migrate.check(postgres_url) == []
    migrate.downgrade(postgres_url, "0004_audit")
    migrate.upgrade(postgres_url)
    assert migrate.check(postgres_url) == []


@pytest.mark.parametrize(
    "change",
    [
        "CREATE OR REPLACE FUNCTION audit_staged_payload(run text, rollout_id text, model_call_id text) RETURNS bytea"
        " LANGUAGE sql STRICT SET search_path FROM CURRENT AS 'SELECT NULL::bytea'",
        "ALTER FUNCTION audit_staged_payload SECURITY DEFINER",
        "ALTER FUNCTION audit_staged_payload RESET search_path",
    ],
)
def test_check_names_a_function_that_is_missing_or_altered(postgres_url: str, change: str) -> None:
    probes.rows(postgres_url, change)
    missing = "missing: function audit_staged_payload"
    assert migrate.check(postgres_url) == [
        missing,
        "unexpected: function audit_staged_payload, altered",
    ]
    probes.rows(postgres_url, "DROP FUNCTION audit_staged_payload")
    assert migrate.check(postgres_url) == [missing]


def test_views_outlive_a_copy_of_their_table(sqlite_url: str) -> None:
    """As a later revision of SQLite's tables makes it."""
    before = probes.routines(sqlite_url)
    ((creation,),) = probes.rows(sqlite_url, "SELECT sql FROM sqlite_master WHERE name = 'entries'")
    probes.run_script(
        sqlite_url,
        "BEGIN; PRAGMA legacy_alter_table = ON; ALTER TABLE entries RENAME TO entries_before;"
        f"PRAGMA legacy_alter_table = OFF; {creation}; INSERT INTO entries SELECT * FROM entries_before;"
        "DROP TABLE entries_before; COMMIT",
    )
    assert probes.routines(sqlite_url) == before
    for view in VIEWS:
        assert probes.rows(sqlite_url, f"SELECT * FROM {view}") == []


def test_check_ignores_what_others_keep(migrated_url: str) -> None:
    probes.run_script(migrated_url, "CREATE TABLE of_somebody_else (a INTEGER)")
    probes.run_script(migrated_url, "CREATE VIEW also_theirs AS SELECT a FROM of_somebody_else")
    assert migrate.check(migrated_url) == []


def test_down_to_base_leaves_nothing_and_up_again_gives_the_same(empty_url: str) -> None:
    assert migrate.upgrade(empty_url) == (None, migrate.HEAD)
    first = probes.catalogue(empty_url), probes.routines(empty_url)
    assert migrate.downgrade(empty_url, "base") == (migrate.HEAD, None)
    assert probes.objects(empty_url) == []
    assert migrate.upgrade(empty_url) == (None, migrate.HEAD)
    assert (probes.catalogue(empty_url), probes.routines(empty_url)) == first


def test_each_revision_can_be_reached_in_both_directions(empty_url: str) -> None:
    for revision in migrate.REVISIONS:
        migrate.upgrade(empty_url, revision)
        assert migrate.current(empty_url) == revision
    for revision in reversed(migrate.REVISIONS[:-1]):
        migrate.downgrade(empty_url, revision)
        assert migrate.current(empty_url) == revision


@pytest.mark.parametrize("by", ["dialect", "url"])
def test_offline_sql_builds_the_same_database(new_database: Callable[[], str], dialect: str, by: str) -> None:
    migrated, written = new_database(), new_database()
    migrate.upgrade(migrated)
    script = migrate.sql(dialect if by == "dialect" else written)
    assert (
        probes.objects(written) == []
        if dialect == "postgresql"
        else not Path(probes.path_of(written)).exists()
    )
    if dialect == "postgresql":

        async def execute() -> None:
            connection = await asyncpg.connect(written)
            try:
                await connection.execute(script)
            finally:
                await connection.close()

        asyncio.run(execute())
    else:
        probes.run_script(written, script)
    assert probes.catalogue(written) == probes.catalogue(migrated)
    assert probes.routines(written) == probes.routines(migrated)
    assert migrate.check(written) == []


def test_offline_sql_needs_two_known_revisions() -> None:
    for revisions in ("base:0000_never", "head", "", "base:head:head"):
        with pytest.raises(migrate.UnknownRevisionError, match="base, 0001_capture"):
            migrate.sql("sqlite", revisions)


def test_the_revisions_in_code_are_those_of_the_scripts() -> None:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "tokencustody.schema:migrations")
    scripts = ScriptDirectory.from_config(config)
    walked = [script.revision for script in scripts.walk_revisions()]
    assert list(migrate.REVISIONS) == walked[::-1]
    assert scripts.get_heads() == [migrate.HEAD]


def test_the_wire_schemas_in_code_are_those_that_migrations_stamp(migrated_url: str) -> None:
    assert dict(probes.rows(migrated_url, "SELECT name, version FROM wire_schema")) == migrate.WIRE_SCHEMAS


@pytest.mark.parametrize("given", ["-x", "variable"])
def test_alembics_own_command_line_reaches_head(
    empty_url: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["-x", f"url={empty_url}"] if given == "-x" else []
    monkeypatch.setenv("TOKENCUSTODY_URL", "sqlite:///never.db" if arguments else empty_url)
    command = [sys.executable, "-W", "error", "-m", "alembic", "-c", str(ROOT / "alembic.ini")]
    subprocess.run([*command, *arguments, "upgrade", "head"], check=True, capture_output=True)
    assert migrate.check(empty_url) == []
    offline = subprocess.run(
        [*command, *arguments, "upgrade", "head", "--sql"], check=True, capture_output=True, text=True
    )
    assert offline.stdout == migrate.sql(empty_url)
