"""The functions of both databases give the arrays that were written, in every bit, or an error that names the call."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from typing import Any

import asyncpg
import pytest

from tests.support import postgres, probes
from tests.support.audited import ask, set_parent
from tests.support.entries import make_entry
from tests.support.rollouts import linear_rollout
from tests.support.staged import stage
from tokencustody import TokenEntry, open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import CorruptEntryError
from tokencustody.schema import migrate
from tokencustody.sql_prompt.functions import connect
from tokencustody.store import SqlStagingStore

RUN = "run-1"
ODD_FLOATS = [
    -0.0,
    0.0,
    math.nan,
    math.inf,
    -math.inf,
    5e-324,
    -5e-324,
    2.2250738585072014e-308,
    1.7976931348623157e308,
]
CHAIN = [turn.entry for turn in linear_rollout(12, deltas={4, 5, 9}, rollout_id="chain")]
Decode = Callable[..., list[Any] | None]


def put(url: str, *entries: TokenEntry) -> None:
    async def write() -> None:
        async with open_store(url, run=RUN) as store:
            for entry in entries:
                await store.sink.put(entry)

    asyncio.run(write())


def decode(url: str, function: str, rollout_id: str, call: str, run: str = RUN) -> list[Any] | None:
    """Return the array that a function gives; CorruptEntryError with the words of the database."""
    if url.startswith("sqlite"):
        connection, functions = connect(parse_url(url))
        with closing(connection):
            try:
                (text,) = connection.execute(
                    f"SELECT {function}(?, ?, ?)", (run, rollout_id, call)
                ).fetchone()
            except sqlite3.OperationalError:
                assert functions.error is not None
                raise functions.error from None
        return (
            None
            if text is None
            else [float(each) if isinstance(each, str) else each for each in json.loads(text)]
        )
    arguments = ", ".join("'" + each.replace("'", "''") + "'" for each in (run, rollout_id, call))
    try:
        (row,) = postgres.fetch(url, f"SELECT {function}({arguments}) AS found")
    except asyncpg.PostgresError as exc:
        raise CorruptEntryError(str(exc)) from None
    found = row["found"]
    return found if found is None or function.endswith(("probs", "mask")) else [int(each) for each in found]


def bits(values: list[float] | None) -> list[bytes]:
    # The one NaN that both can say.
    return [struct.pack("<d", math.nan if value != value else value) for value in values or []]


def check(url: str, entry: TokenEntry) -> None:
    key = (entry.rollout_id, entry.model_call_id)
    assert decode(url, "audit_prompt_token_ids", *key) == entry.prompt_token_ids
    assert decode(url, "audit_generation_token_ids", *key) == entry.generation_token_ids
    assert bits(decode(url, "audit_generation_log_probs", *key)) == bits(entry.generation_log_probs)


@pytest.mark.parametrize("largest", [0, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_ids_of_every_width_come_back(store_url: str, largest: int) -> None:
    entry = make_entry(prompt=[1, largest, 0], generation=[largest, 2], log_probs=[-0.5, -1.25])
    put(store_url, entry)
    check(store_url, entry)


def test_floats_come_back_in_every_bit(store_url: str) -> None:
    rng = random.Random(7)
    patterns = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(300)]
    floats = [*ODD_FLOATS, *patterns, *(-rng.expovariate(1) for _ in range(100))]
    entry = make_entry(prompt=[], generation=[1] * len(floats), log_probs=floats)
    put(store_url, entry)
    check(store_url, entry)


def test_a_prompt_that_begins_in_its_parents_is_whole_again(store_url: str) -> None:
    put(store_url, *CHAIN)
    assert any(row["shared_len"] for row in ask(store_url, "SELECT shared_len FROM audit_calls"))
    for entry in CHAIN:
        check(store_url, entry)


def test_a_parent_of_narrower_ids_is_widened(store_url: str) -> None:
    entries = [make_entry("wide", "call-0", prompt=[1, 2, 3], generation=[4])]
    ids = [1, 2, 3, 4]
    for number, added in enumerate((70_000, 2**40), start=1):
        prompt, generation = [*ids, added], [number]
        entries.append(
            make_entry(
                "wide",
                f"call-{number}",
                prompt=prompt,
                generation=generation,
                parent=f"call-{number - 1}",
                cumulative=[*prompt, *generation],
            )
        )
        ids = [*prompt, *generation]
    put(store_url, *entries)
    widths = ask(store_url, "SELECT token_width, shared_len FROM audit_calls ORDER BY model_call_id")
    assert [tuple(row.values()) for row in widths] == [(2, 0), (4, 4), (8, 6)]
    for entry in entries:
        check(store_url, entry)


def test_a_call_that_is_not_there_gives_null(store_url: str) -> None:
    put(store_url, make_entry())
    for function in ("audit_prompt_token_ids", "audit_generation_log_probs", "audit_staged_token_ids"):
        assert decode(store_url, function, "rollout-1", "another") is None
        assert decode(store_url, function, "rollout-1", "call-1", run="another") is None
        assert ask_for_null(store_url, function) is None


def ask_for_null(url: str, function: str) -> Any:
    if not url.startswith("sqlite"):
        return postgres.fetch(url, f"SELECT {function}(NULL, 'a', 'b') AS found")[0]["found"]
    connection, _ = connect(parse_url(url))
    with closing(connection):
        return connection.execute(f"SELECT {function}(NULL, 'a', 'b')").fetchone()[0]


FLIPS = {
    "sqlite": "UPDATE {} SET payload = CAST(substr(payload, 1, 21) || x'FF' || substr(payload, 23) AS BLOB)",
    "postgresql": "UPDATE {} SET payload = set_byte(payload, 21, 255)",
}


@pytest.mark.parametrize("function", ["prompt_token_ids", "generation_token_ids", "generation_log_probs"])
def test_flipped_bytes_are_an_error_that_names_the_call(store_url: str, function: str) -> None:
    put(store_url, make_entry())
    probes.run_script(store_url, FLIPS[parse_url(store_url).dialect].format("entries"))
    with pytest.raises(CorruptEntryError, match=r"model call call-1 of rollout rollout-1.*SHA-256"):
        decode(store_url, f"audit_{function}", "rollout-1", "call-1")


@pytest.mark.parametrize("parent", ["call-0", "gone", "call-7", "call-6"])
def test_a_prompt_is_not_rebuilt_from_another_call(store_url: str, parent: str) -> None:
    """Neither from a shorter one, nor from none, nor from itself, nor from one that it is in a circle with."""
    put(store_url, *CHAIN)
    set_parent(store_url, "chain", {"call-7": parent} if parent != "call-6" else {"call-6": "call-7"})
    with pytest.raises(CorruptEntryError, match=r"call call-\d of rollout chain.*cannot be rebuilt"):
        decode(store_url, "audit_prompt_token_ids", "chain", "call-7")


def test_staged_columns_come_back(store_url: str) -> None:
    root = stage("a", added=[1, 2**16, 2**64 - 1], sampled=[3])
    child = stage("b", root, added=[], sampled=[7, 8])
    with SqlStagingStore(store_url, run=RUN) as staging:
        assert all(staging.stage(each.snapshot).ok for each in (root, child))
    for each in (root.snapshot, child.snapshot):
        key = ("r", each.model_call_id)
        assert decode(store_url, "audit_staged_token_ids", *key) == each.token_ids_delta
        assert bits(decode(store_url, "audit_staged_token_mask", *key)) == bits(each.token_mask_delta)
        assert bits(decode(store_url, "audit_staged_log_probs", *key)) == bits(
            each.generation_log_probs_delta
        )
    probes.run_script(store_url, FLIPS[parse_url(store_url).dialect].format("staged_calls"))
    with pytest.raises(CorruptEntryError, match=r"staged call b of rollout r.*SHA-256"):
        decode(store_url, "audit_staged_token_ids", "r", "b")


def test_a_negative_zero_in_a_mask_comes_back(store_url: str) -> None:
    staged = stage("a", mask=[-0.0, 0.0, 1.0])
    with SqlStagingStore(store_url, run=RUN) as staging:
        assert staging.stage(staged.snapshot).ok
    assert bits(decode(store_url, "audit_staged_token_mask", "r", "a")) == bits([-0.0, 0.0, 1.0])


def test_decoding_takes_time_in_proportion_to_the_tokens(postgres_url: str) -> None:
    rng = random.Random(1)
    few, many = 1_000, 10_000
    for count in (few, many):
        ids = [rng.randrange(150_000) for _ in range(count)]
        log_probs = [-rng.random() for _ in ids]
        put(postgres_url, make_entry(str(count), prompt=ids, generation=ids, log_probs=log_probs))

    def taken(count: int) -> float:
        """Return the shortest of several times, by the server's clock."""
        asked = (
            "EXPLAIN (ANALYZE, FORMAT JSON) SELECT audit_prompt_token_ids(run, rollout_id, model_call_id) IS NULL,"
            " audit_generation_log_probs(run, rollout_id, model_call_id) IS NULL"
            f" FROM audit_calls WHERE rollout_id = '{count}'"
        )
        plans = (json.loads(postgres.fetch(postgres_url, asked)[0][0]) for _ in range(5))
        return min(float(plan["Execution Time"]) for (plan,) in plans)

    # What grew with their square would take a hundred times as long.
    assert taken(many) < 3 * many / few * taken(few)


async def test_functions_work_in_any_schema_and_under_any_search_path(empty_postgres_url: str) -> None:
    connection = await asyncpg.connect(empty_postgres_url)
    try:
        await connection.execute('CREATE SCHEMA "Odd schéma"')
        url = f"{empty_postgres_url}?options=-csearch_path%3D%22Odd%5C%20sch%C3%A9ma%22"
        await asyncio.to_thread(migrate.upgrade, url)
        assert await asyncio.to_thread(migrate.check, url) == []
        async with open_store(url, run=RUN) as store:
            for entry in CHAIN:
                await store.sink.put(entry)
        # Whoever calls may have tables and functions of the same names before ours.
        await connection.execute(
            "CREATE SCHEMA theirs; CREATE TABLE theirs.entries (run text);"
            "CREATE FUNCTION theirs.sha256(bytea) RETURNS bytea LANGUAGE sql AS 'SELECT $1';"
            "SET search_path = theirs, pg_catalog"
        )
        found = await connection.fetchval(
            'SELECT "Odd schéma".audit_prompt_token_ids($1, $2, $3)', RUN, "chain", CHAIN[-1].model_call_id
        )
        assert list(map(int, found)) == CHAIN[-1].prompt_token_ids
        assert await connection.fetchval('SELECT count(*) FROM "Odd schéma".audit_rollouts') == 1
        await asyncio.to_thread(migrate.downgrade, url, "base")
        left = "SELECT count(*) FROM pg_proc WHERE pronamespace = '\"Odd schéma\"'::regnamespace"
        assert await connection.fetchval(left) == 0
    finally:
        await connection.close()


async def test_whoever_may_not_read_the_payload_may_not_decode_it(postgres_url: str) -> None:
    await asyncio.to_thread(put, postgres_url, make_entry())
    connection = await asyncpg.connect(postgres_url)
    try:
        async with connection.transaction():
            await connection.execute(
                "CREATE ROLE audit_functions_reader; GRANT USAGE ON SCHEMA public TO audit_functions_reader;"
                "GRANT SELECT ON ALL TABLES IN SCHEMA public TO audit_functions_reader;"
                "REVOKE SELECT ON entries, staged_calls FROM audit_functions_reader;"
                "GRANT SELECT (run, rollout_id, model_call_id, payload_sha256, stored_sha256) ON entries"
                " TO audit_functions_reader;"
                "GRANT SELECT (run, rollout_id, model_call_id, payload_sha256) ON staged_calls"
                " TO audit_functions_reader"
            )
            await connection.execute("SET LOCAL ROLE audit_functions_reader")
            assert await connection.fetchval("SELECT count(*) FROM audit_calls") == 1
            for function in ("prompt_token_ids", "generation_log_probs", "staged_token_ids", "whole_payload"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    async with connection.transaction():
                        await connection.fetch(
                            f"SELECT audit_{function}(run, rollout_id, model_call_id) FROM audit_calls"
                        )
            await connection.execute(
                "RESET ROLE; DROP OWNED BY audit_functions_reader; DROP ROLE audit_functions_reader"
            )
    finally:
        await connection.close()
