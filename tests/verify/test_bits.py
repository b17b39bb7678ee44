"""Single flipped bits in a SQLite file, in every value of every row: what is found, and what nothing can tell."""

from __future__ import annotations

import random
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.verify.verifying import RUN, fill
from tokencustody.database.url import parse_url
from tokencustody.schema.tables import OF_ROLLOUTS
from tokencustody.txn.fence import RolloutKey
from tokencustody.verify import running, verify
from tokencustody.verify.rollouts import Verifier

_KEYS = {"run", "rollout_id"}
# Nothing else in the database says the same, or not for every row; docs and README name them too.
_NOT_PROVEN = {
    "fences": {"incomplete"},
    # The seal and the evidence of a retired rollout are of what is gone.
    "snapshot_versions": {"event_id", "written_by", "recorded_at", "model_call_id", "sealed_sha256"},
    "failures": {
        "second_payload_sha256",
        "differing_fields",
        "second_fingerprint",
        "second_fingerprint_version",
        "second_context_len",
        "second_context_digest",
    },
    "intents": {*_KEYS, "model_call_id", "begun_at", "written_by", "refusal_code"},
    "entries": {*_KEYS, "committed_at", "written_by"},
    "exports": {
        *_KEYS,
        "export_id",
        "destination",
        "exported_at",
        "written_by",
        "manifest_sha256",
        "version",
        "is_held",
    },
    # The whole row is moved to another rollout, where nobody looks here.
    "ledger_calls": _KEYS,
    "ledger_failures": _KEYS,
    "staged_attachments": _KEYS,
    "staged_calls": {*_KEYS, "staged_at", "written_by"},
}


def _flipped(rng: random.Random, value: Any) -> Any:
    """Return a value with one bit flipped; text as bytes, for it may be no text any more."""
    if isinstance(value, int):
        return value ^ (1 << rng.randrange(8))
    data = bytearray(struct.pack("<d", value) if isinstance(value, float) else _bytes(value))
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return struct.unpack("<d", data)[0] if isinstance(value, float) else bytes(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _flips(file: sqlite3.Connection, rng: random.Random) -> Iterator[tuple[str, str, RolloutKey]]:
    """Flip a bit of each value, yield where, and flip it back."""
    for table in OF_ROLLOUTS:
        for rowid, *values in file.execute(f"SELECT rowid, * FROM {table.name}").fetchall():
            for column, value in zip(table.columns, values, strict=True):
                if value in (None, "", b""):
                    continue
                new = "CAST(? AS TEXT)" if isinstance(value, str) else "?"
                update = f"UPDATE {table.name} SET {column.name} = {{}} WHERE rowid = ?"
                try:
                    file.execute(update.format(new), (_flipped(rng, value), rowid))
                except sqlite3.IntegrityError:
                    continue  # NULL for a NaN, or a key that another row has
                yield table.name, column.name, RolloutKey(*values[:2])
                file.execute(update.format("?"), (value, rowid))


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_is_found_wherever_something_else_proves_the_value(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "captures.db"
    fill(str(path))
    missed: defaultdict[str, set[str]] = defaultdict(set)
    flips = found = 0
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as file,
        Verifier(parse_url(path), 30.0) as verifier,
    ):
        file.execute("PRAGMA ignore_check_constraints = ON")
        file.execute("PRAGMA synchronous = OFF")
        file.execute(
            "INSERT INTO exports SELECT run, rollout_id, 'x', snapshot_id, version, 'folder', ?, opened_at, 'me', TRUE"
            " FROM fences WHERE run = ? AND rollout_id = 'linear'",
            ("ab" * 32, RUN),
        )
        assert verifier.verify([RolloutKey(RUN, "linear")]).findings == []
        for table, column, key in _flips(file, random.Random(seed)):
            flips += 1
            if verifier.verify([key]).findings:
                found += 1
            else:
                missed[table].add(column)

    assert flips > 1500
    assert found > 0.8 * flips
    assert not {
        f"{table}.{column}" for table, columns in missed.items() for column in columns - _NOT_PROVEN[table]
    }


def test_an_id_that_is_no_text_any_more_hides_no_other_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that the next page begins after that id.
    monkeypatch.setattr(running, "PAGE", 1)
    path = tmp_path / "captures.db"
    fill(str(path))
    with closing(sqlite3.connect(path)) as file:
        file.execute(
            "UPDATE staged_calls SET rollout_id = CAST(x'80ff' AS TEXT) WHERE rollout_id = 'orphans'"
        )
        file.execute(
            "UPDATE ledger_calls SET staging_key = CAST(x'80ff' AS TEXT) WHERE rollout_id = 'resumed'"
        )
        file.commit()

    report = verify(path)

    assert report.counts.rollouts == 18
    assert {(each.rule.value, each.rollout_id) for each in report.findings} == {
        ("unreadable", "\udc80\udcff"),
        ("column_form", "resumed"),
    }
