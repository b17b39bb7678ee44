"""What the revision that brings shared prefixes does to the calls of a database that has some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.schema.test_frozen import load_postgresql, load_sqlite
from tests.support import probes
from tokencustody.errors import SchemaMismatchError
from tokencustody.schema import migrate

BEFORE, AFTER = "0002_staging", "0003_prefix_sharing"

ENTRIES = "SELECT * FROM entries ORDER BY run, rollout_id, model_call_id"
STORAGE = """
SELECT attrelid::regclass || '.' || attname || ' ' || attstorage::text FROM pg_attribute
 WHERE attrelid::regclass::text IN ('entries', 'staged_calls', 'staged_attachments') AND atttypid = 'bytea'::regtype
"""


@pytest.fixture
def filled_url(empty_url: str, tmp_path: Path) -> str:
    """A database of the revision before, with calls in it."""
    if empty_url.startswith("sqlite"):
        load_sqlite(Path(probes.path_of(empty_url)), BEFORE)
    else:
        load_postgresql(empty_url, BEFORE, tmp_path / "scratch.db")
    return empty_url


def share(url: str) -> None:
    """Let the call `child` hold its prompt without its first id."""
    changes = f"shared_len = 1, stored_sha256 = '{'1' * 64}'"
    probes.run_script(url, f"UPDATE entries SET {changes} WHERE model_call_id = 'child'")


def test_calls_that_were_stored_before_share_nothing(filled_url: str) -> None:
    before = probes.rows(filled_url, "SELECT model_call_id, payload, payload_sha256 FROM entries")
    migrate.upgrade(filled_url, AFTER)
    after = probes.rows(filled_url, "SELECT model_call_id, payload, payload_sha256 FROM entries")
    assert sorted(after) == sorted(before)
    assert len(after) > 5
    columns = "shared_len, stored_sha256"
    assert probes.rows(filled_url, f"SELECT DISTINCT {columns} FROM entries") == [(0, None)]


def test_an_upgrade_that_fails_leaves_every_call_as_it_was(filled_url: str) -> None:
    before = probes.catalogue(filled_url), probes.rows(filled_url, ENTRIES)

    def fail(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match=f"applied {AFTER}"):
        migrate.upgrade(filled_url, AFTER, progress=fail)
    assert (probes.catalogue(filled_url), probes.rows(filled_url, ENTRIES)) == before
    assert migrate.current(filled_url) == BEFORE


def test_a_view_of_the_calls_survives_the_upgrade(filled_url: str) -> None:
    probes.run_script(filled_url, "CREATE VIEW lengths AS SELECT model_call_id, prompt_len FROM entries")
    before = probes.rows(filled_url, "SELECT * FROM lengths ORDER BY 1, 2")
    migrate.upgrade(filled_url, AFTER)
    assert probes.rows(filled_url, "SELECT * FROM lengths ORDER BY 1, 2") == before != []


def test_a_downgrade_that_would_cut_prompts_is_refused_and_changes_nothing(filled_url: str) -> None:
    migrate.upgrade(filled_url, AFTER)
    share(filled_url)
    before = probes.catalogue(filled_url), probes.rows(filled_url, ENTRIES)
    with pytest.raises(SchemaMismatchError, match=rf"1 calls.*{BEFORE} cannot read: retire or delete"):
        migrate.downgrade(filled_url, BEFORE)
    assert (probes.catalogue(filled_url), probes.rows(filled_url, ENTRIES)) == before
    assert migrate.current(filled_url) == AFTER


def test_a_downgrade_to_base_drops_shared_prompts_with_everything_else(filled_url: str) -> None:
    migrate.upgrade(filled_url, AFTER)
    share(filled_url)
    migrate.downgrade(filled_url, "base")
    assert probes.objects(filled_url) == []


def test_postgresql_writes_no_call_again(empty_postgres_url: str, tmp_path: Path) -> None:
    load_postgresql(empty_postgres_url, BEFORE, tmp_path / "scratch.db")
    places = (
        "SELECT pg_relation_filenode(c.oid), pg_relation_filenode(c.reltoastrelid), e.ctid"
        " FROM pg_class c, entries e WHERE c.oid = 'entries'::regclass ORDER BY e.ctid"
    )
    before = probes.rows(empty_postgres_url, places)
    migrate.upgrade(empty_postgres_url, AFTER)
    assert probes.rows(empty_postgres_url, places) == before != []


def test_postgresql_does_not_compress_token_bytes(empty_postgres_url: str) -> None:
    def storage() -> set[Any]:
        return {line for (line,) in probes.rows(empty_postgres_url, STORAGE)}

    packed = ("entries.payload", "staged_calls.payload", "staged_attachments.data")
    migrate.upgrade(empty_postgres_url, AFTER)
    # Extras are JSON text.
    assert storage() == {*(f"{column} e" for column in packed), "staged_calls.extras x"}
    migrate.downgrade(empty_postgres_url, BEFORE)
    assert storage() == {*(f"{column} x" for column in packed), "staged_calls.extras x"}
