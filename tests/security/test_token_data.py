"""Token ids and log probabilities stand in the database and nowhere else: in no error and in no log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest

from tests.security.leaks import forms_of, said_by
from tests.support.entries import make_entry
from tests.support.postgres import fetch
from tests.support.staged import stage
from tokencustody.database.coalescing import Coalesce
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError, TokenCaptureFrozenError
from tokencustody.records import TokenEntry
from tokencustody.staging.records import StagedCallSnapshot
from tokencustody.store import SqlStagingStore, open_store

PROMPT = [1_911_711_511, 1_822_622_422]
GENERATION = [1_733_533_133, 1_644_244_344]
LOG_PROBS = [-0.777123456789, -0.888987654321]
FORMS = forms_of([*PROMPT, *GENERATION], LOG_PROBS)
TABLES = ["entries", "staged_calls"]


def entry(**fields: Any) -> TokenEntry:
    return make_entry(**({"prompt": PROMPT, "generation": GENERATION, "log_probs": LOG_PROBS} | fields))


def staged(*, weight_version: int = 1, **components: Any) -> StagedCallSnapshot:
    made = stage(
        "call-1", added=PROMPT, sampled=GENERATION, rollout="rollout-1", weight_version=weight_version
    )
    names = set(StagedCallSnapshot.model_fields) - {
        "schema_version",
        "digest_version",
        "extras_digest_version",
    }
    values = {name: getattr(made.snapshot, name) for name in names - {"digest", "staging_key"}}
    return StagedCallSnapshot.from_components(
        **(values | {"generation_log_probs_delta": [0.0, 0.0, *LOG_PROBS]} | components)
    )


def assert_silent(text: str) -> None:
    shown = [form for form in FORMS if form in text]
    assert not shown, text


@pytest.fixture(autouse=True)
def _silent_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a test does, no logger of any library says a token id, at its most talkative."""
    caplog.set_level(logging.DEBUG)
    names = (
        "sqlalchemy",
        "sqlalchemy.engine",
        "sqlalchemy.pool",
        "aiosqlite",
        "asyncio",
        "asyncpg",
        "tokencustody",
    )
    for name in names:
        caplog.set_level(logging.DEBUG, logger=name)
    yield
    logged = [logging.Formatter().format(record) for record in caplog.get_records("call")]
    assert_silent("\n".join(logged))


# What a trigger raises: tried again, given up at once, and of no class that the store knows. The row is in the
# detail, where PostgreSQL itself puts it.
SQLSTATES = ["40001", "53100", "P0001"]
RAISING = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION USING ERRCODE = '{state}', MESSAGE = 'refused', DETAIL = NEW::text;
END $$
"""
DAMAGES = {
    "check": ["ALTER TABLE {0} ADD CONSTRAINT never CHECK (octet_length(payload) < 1) NOT VALID"],
    "no table": ["ALTER TABLE {0} RENAME TO gone_{0}"],
    "no column": ["ALTER TABLE {0} RENAME COLUMN payload TO gone"],
    "not null": [
        "ALTER TABLE {0} ADD COLUMN wanted integer NOT NULL DEFAULT 0",
        "ALTER TABLE {0} ALTER COLUMN wanted DROP DEFAULT",
    ],
} | {
    f"raise {state}": [
        "DROP FUNCTION IF EXISTS refuse() CASCADE",
        RAISING.format(state=state),
        *(
            f"CREATE TRIGGER refuse BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION refuse()"
            for table in TABLES
        ),
    ]
    for state in SQLSTATES
}
SQLITE_DAMAGES = {
    "raise": ["CREATE TRIGGER refuse_{0} BEFORE INSERT ON {0} BEGIN SELECT RAISE(ABORT, 'refused'); END"],
    "no table": ["ALTER TABLE {0} RENAME TO gone_{0}"],
    "no column": ["ALTER TABLE {0} RENAME COLUMN payload TO gone"],
    "another type": [
        "CREATE TRIGGER refuse_{0} BEFORE INSERT ON {0} BEGIN SELECT json(new.payload); END",
    ],
}


async def write_everywhere(url: str, coalesce: str) -> list[Any]:
    """Try every write that has token data, and return the errors."""
    everything = [*PROMPT, *GENERATION]
    child = entry(
        model_call_id="call-3",
        parent="call-1",
        prompt=[*everything, PROMPT[0]],
        cumulative=[*everything, PROMPT[0], *GENERATION],
    )
    errors: list[Any] = []
    async with open_store(url, deadline=0.3, coalesce=coalesce) as store:
        for attempt in (entry(), entry(model_call_id="call-2", text="Lyon."), child):
            try:
                await store.sink.put(attempt)
            except Exception as exc:
                errors.append(exc)
    with SqlStagingStore(url, deadline=0.3, coalesce=coalesce) as staging:
        try:
            errors.append(await asyncio.to_thread(staging.stage, staged()))
        except Exception as exc:
            errors.append(exc)
    return errors


def assert_all_failed_silently(errors: list[Any]) -> None:
    assert len(errors) == 4
    for error in errors:
        if isinstance(error, BaseException):
            assert_silent(said_by(error))
        else:
            assert not error.ok
            assert_silent(repr(error))


# The modes have two ways to the database: one statement, and a transaction of several.
@pytest.mark.parametrize("coalesce", [Coalesce.PROCESS, Coalesce.ROLLOUT])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_no_error_of_postgresql_shows_the_row_it_is_about(
    postgres_url: str, damage: str, coalesce: str
) -> None:
    for statement in DAMAGES[damage]:
        for table in TABLES if "{0}" in statement else TABLES[:1]:
            fetch(postgres_url, statement.format(table) if "{0}" in statement else statement)
    assert_all_failed_silently(await write_everywhere(postgres_url, coalesce))


@pytest.mark.parametrize("damage", SQLITE_DAMAGES)
async def test_no_error_of_sqlite_shows_the_row_it_is_about(sqlite_url: str, damage: str) -> None:
    async with open_store(sqlite_url) as store:
        await store.sink.begin_call("another", "call")
    with contextlib.closing(sqlite3.connect(parse_url(sqlite_url).dsn)) as connection:
        for statement in SQLITE_DAMAGES[damage]:
            for table in TABLES:
                connection.execute(statement.format(table))
        connection.commit()
    assert_all_failed_silently(await write_everywhere(sqlite_url, Coalesce.PROCESS))


async def test_no_error_that_the_contract_names_shows_token_data(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(entry())
        for other in (
            entry(generation=GENERATION[::-1]),
            entry(prompt=PROMPT[::-1]),
            entry(log_probs=LOG_PROBS[::-1]),
        ):
            with pytest.raises(PayloadConflictError) as conflict:
                await store.sink.put(other)
            assert_silent(said_by(conflict.value))
        snapshot = await store.source.freeze("rollout-1")
        with pytest.raises(TokenCaptureFrozenError) as frozen:
            await store.sink.put(entry(model_call_id="late"))
        await store.source.drop("rollout-1", snapshot.snapshot_id, snapshot.version)
        with pytest.raises(TokenCaptureFrozenError) as retired:
            await store.sink.put(entry(model_call_id="late"))
        assert_silent(said_by(frozen.value) + said_by(retired.value))
    with SqlStagingStore(store_url) as staging:
        assert (await asyncio.to_thread(staging.stage, staged())).ok
        answer = await asyncio.to_thread(staging.stage, staged(weight_version=2))
        assert not answer.ok
        assert_silent(repr(answer))


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [*PROMPT, -1]},
        {"prompt": [*PROMPT, 2**64]},
        {"prompt": [*PROMPT, 1.5]},
        {"generation": [*GENERATION, "1644244344"]},
        {"log_probs": [*LOG_PROBS, "-0.777123456789"]},
        {"log_probs": [LOG_PROBS[0]]},
        {"log_probs": [*LOG_PROBS, None]},
        {"prompt_digest": 1_911_711_511},
    ],
)
async def test_what_is_refused_before_the_database_shows_no_token_data(
    sqlite_url: str, fields: dict[str, Any]
) -> None:
    async with open_store(sqlite_url) as store:
        try:
            await store.sink.put(entry(**fields))
        except (ValueError, TypeError) as exc:
            assert_silent(said_by(exc))


@pytest.mark.parametrize(
    "components",
    [
        {"token_ids_delta": [*PROMPT, *GENERATION, -1]},
        {"token_ids_delta": [*PROMPT, GENERATION[0], "1644244344"]},
        {"generation_log_probs_delta": [0.0, 0.0, LOG_PROBS[0], float("nan")]},
        {"generation_log_probs_delta": [0.0, LOG_PROBS[1], *LOG_PROBS]},
        {"token_mask_delta": [0.5] * 4},
        {"chain_hash": "nonsense"},
        {"delta_len": 1_644_244},
    ],
)
def test_a_staged_call_that_is_refused_shows_no_token_data(components: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - pydantic's error is one
        staged(**components)
    assert_silent(said_by(refused.value))


async def test_reading_shows_no_token_data_in_the_log_or_to_who_watches_the_server(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.sink.put(entry())
        snapshot = await store.source.freeze("rollout-1")
        assert snapshot.entries[0].generation_token_ids == GENERATION
        with SqlStagingStore(store_url) as staging:
            await asyncio.to_thread(staging.stage, staged())
            (read,) = await asyncio.to_thread(staging.fetch, ["rollout-1/call-1"])
            assert list(read.token_ids_delta) == [*PROMPT, *GENERATION]
        if not parse_url(store_url).is_sqlite:
            watched = await asyncio.to_thread(
                fetch, store_url, "SELECT query, application_name FROM pg_stat_activity"
            )
            assert any(row["application_name"] == "tokencustody" for row in watched)
            assert_silent(str([tuple(row) for row in watched]))
