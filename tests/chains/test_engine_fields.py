"""What engines record beside the tokens: it is exported as it is, and as a number only where it is one."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.export.exports import manifest, parquet_rows, put_rollout, put_staged
from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.staged import stage
from tokencustody import open_store
from tokencustody.chains.engine_fields import engine_fields
from tokencustody.export import ExportOptions, export, parquet
from tokencustody.staging import decode_routed_experts, encode_routed_experts

SPANS = [{"version": 3, "start": 0, "end": 2}, {"version": 4, "start": 2, "end": 3}]
ONE_SPAN = [{"version": "3", "start": 0, "end": 3}]
BOTH = '{{"weight_version":{},"weight_versions":{}}}'


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "integer", "recorded"),
    [
        ({}, None, None),
        ({"weight_version": 3}, 3, None),
        ({"weight_version": "3"}, 3, None),
        ({"weight_version": "03"}, 3, '"03"'),
        ({"weight_version": "step-3"}, None, '"step-3"'),
        ({"weight_version": "٣"}, None, '"٣"'),
        ({"weight_version": ""}, None, '""'),
        ({"weight_version": True}, None, "true"),
        ({"weight_version": 3.0}, None, "3.0"),
        ({"weight_version": 2**63}, None, str(2**63)),
        ({"weight_version": "9" * 5000}, None, f'"{"9" * 5000}"'),
        ({"weight_version": [3, 3]}, 3, "[3,3]"),
        ({"weight_version": [3, "4"]}, None, '[3,"4"]'),
        ({"weight_version": []}, None, "[]"),
        ({"weight_version": SPANS}, None, _compact(SPANS)),
        ({"weight_versions": ONE_SPAN}, 3, _compact(ONE_SPAN)),
        ({"meta_info": {"weight_version": "3", "id": "x"}}, 3, None),
        ({"meta_info": {"weight_version": SPANS}}, None, _compact(SPANS)),
        ({"meta_info": "none", "weight_version": None}, None, None),
        (
            {"weight_version": [{"version": 3, "weight_version": 4}]},
            None,
            '[{"version":3,"weight_version":4}]',
        ),
        ({"weight_version": 3, "weight_versions": None, "meta_info": {"weight_version": "3"}}, 3, None),
        (
            {"weight_version": 5, "meta_info": {"weight_version": "3"}},
            None,
            '{"weight_version":5,"meta_info.weight_version":"3"}',
        ),
        (
            {"weight_version": "step-3", "meta_info": {"weight_versions": [3]}},
            None,
            '{"weight_version":"step-3","meta_info.weight_versions":[3]}',
        ),
        ({"weight_version": 3, "weight_versions": SPANS}, None, BOTH.format(3, _compact(SPANS))),
        ({"weight_version": 3, "weight_versions": ONE_SPAN}, 3, BOTH.format(3, _compact(ONE_SPAN))),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_weight_version_is_an_integer_where_it_is_one_and_else_exactly_what_was_recorded(
    fields: dict[str, Any], integer: int | None, recorded: str | None
) -> None:
    found = engine_fields(make_entry(**fields), None)
    assert (found.weight_version, found.recorded_version) == (integer, recorded)


async def test_weight_versions_of_every_form_are_in_the_rows(store_url: str, tmp_path: Path) -> None:
    await put_rollout(
        store_url,
        [
            make_entry(model_call_id="a", prompt=[1], generation=[2], weight_version="3"),
            make_entry(
                model_call_id="b",
                prompt=[1, 2, 3],
                generation=[4, 5],
                parent="a",
                meta_info={"weight_version": SPANS},
            ),
        ],
        freeze=False,
    )
    async with open_store(store_url, run="run-1") as store:
        await store.lineage.record(make_commit(model_call_id="b"))
        await store.source.freeze("rollout-1")
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    # The ledger knows which version answered; the record of the spans stays beside it.
    assert row["weight_versions"] == [3, 3]
    assert row["recorded_weight_versions"][0] is None
    assert json.loads(row["recorded_weight_versions"][1]) == SPANS


def test_where_the_ledger_knows_another_version_that_of_the_record_is_kept_beside_it() -> None:
    ledger = SimpleNamespace(weight_version=7)
    found = engine_fields(make_entry(weight_version="8"), ledger)
    assert (found.weight_version, found.recorded_version) == (7, '"8"')
    found = engine_fields(make_entry(weight_version="7"), ledger)
    assert (found.weight_version, found.recorded_version) == (7, None)


def npy(values: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, values)
    return base64.b64encode(stream.getvalue()).decode()


ROUTES = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


async def test_routed_experts_keep_their_dtype_and_shape(store_url: str, tmp_path: Path) -> None:
    envelope = encode_routed_experts(ROUTES.tolist(), dtype="int8")
    shapes: list[Any] = [
        npy(ROUTES),
        envelope,
        ROUTES.tolist(),
        {"shape": [1], "data": "AA=="},
        None,
        0,
        False,
    ]
    prompt: list[int] = []
    entries = []
    for number, routes in enumerate(shapes):
        parent = f"call-{number - 1}" if number else None
        prompt = [*prompt, 7]
        entries.append(
            make_entry(
                model_call_id=f"call-{number}",
                prompt=prompt,
                generation=[8],
                parent=parent,
                routed_experts=routes,
            )
        )
        prompt = [*prompt, 8]
    await put_rollout(store_url, entries)
    await export(store_url, tmp_path / "out")
    (row,) = parquet_rows(tmp_path / "out")
    found = row["routed_experts"]
    array = np.load(io.BytesIO(base64.b64decode(found[0])))
    assert (array.dtype, array.tolist()) == (ROUTES.dtype, ROUTES.tolist())
    assert (decode_routed_experts(found[1]).dtype, decode_routed_experts(found[1]).values) == (
        "int8",
        ROUTES.tolist(),
    )
    assert [json.loads(each) for each in found[2:4]] == shapes[2:4]
    assert found[4:] == [None, "0", "false"]


async def test_routed_experts_of_staged_calls_are_those_of_their_extras(
    store_url: str, tmp_path: Path
) -> None:
    envelope = encode_routed_experts(ROUTES.tolist())
    root = stage("a", added=(1, 2), sampled=(3,), extras={"routed_experts": envelope})
    await put_staged(store_url, [root, stage("b", root, added=(4,), sampled=(5,))])
    await export(store_url, tmp_path / "out")
    assert parquet_rows(tmp_path / "out")[0]["routed_experts"] == [envelope, None]


async def test_routed_experts_that_are_too_large_for_a_row_are_counted_and_the_row_is_there(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MOST_ROUTES", 10)
    await put_rollout(sqlite_url, [make_entry(routed_experts="A" * 11)])
    await put_rollout(sqlite_url, [make_entry("small", routed_experts="A" * 10)])
    report = await export(sqlite_url, tmp_path / "out")
    assert [row["routed_experts"] for row in parquet_rows(tmp_path / "out")] == [[None], ["A" * 10]]
    assert report.routes_left_out == manifest(tmp_path / "out")["counts"]["routes_left_out"] == 1


async def test_routed_experts_count_towards_the_size_of_a_file_and_what_memory_holds(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    for name in ("a", "b", "c", "d"):
        await put_rollout(sqlite_url, [make_entry(name, routed_experts="A" * 1000)])
    monkeypatch.setattr(parquet, "_ROUTES_PER_GROUP", 2000)
    await export(sqlite_url, tmp_path / "groups")
    assert pq.ParquetFile(tmp_path / "groups" / "part-00000.parquet").num_row_groups == 2
    report = await export(sqlite_url, tmp_path / "files", ExportOptions(max_bytes=2000))
    assert report.files == 2


@pytest.mark.parametrize("form", ["parquet", "calls"])
async def test_tokens_to_train_without_a_finite_log_probability_are_counted(
    store_url: str, tmp_path: Path, form: Any
) -> None:
    await put_rollout(
        store_url, [make_entry(generation=[1, 2, 3, 4], log_probs=[math.nan, -0.5, -math.inf, math.nan])]
    )
    report = await export(store_url, tmp_path / "out", ExportOptions(format=form))
    assert report.not_finite_log_probs == 3
    assert manifest(tmp_path / "out")["counts"]["not_finite_log_probs"] == 3
