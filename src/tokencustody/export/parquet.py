"""Parquet: one row for each trainable chain. pyarrow is imported when it is needed, and not before."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from itertools import accumulate, chain
from typing import Any

from tokencustody.chains.chains import Chain, count_not_finite
from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut, Shape
from tokencustody.chains.rows import rows_of
from tokencustody.chains.rules import RowRules
from tokencustody.errors import ExportError
from tokencustody.export.folder import ExportFolder
from tokencustody.export.report import Exported
from tokencustody.export.rewards import Rewards

# Tokens, of 17 bytes each, that are held before they are written.
_TOKENS_PER_GROUP = 250_000
_BYTES_PER_TOKEN = 17
# Bytes of routed experts that are held before they are written, and the most that one row may have.
_ROUTES_PER_GROUP = 2**26
_MOST_ROUTES = 2**30
_CODES = {"int32": "i", "int64": "q", "double": "d"}
_NESTED = {"call_ids", "models", "parent_resolutions", "response_ids", "payload_sha256"}


def require_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its module for Parquet. Raises ExportError that says how to install it."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ExportError(
            "reading and writing Parquet needs pyarrow: pip install 'tokencustody[export]'"
        ) from None


@cache
def schema() -> Any:
    """Return the columns, as docs/export.md lists them."""
    pa, _ = require_pyarrow()
    texts, numbers = pa.list_(pa.string()), pa.list_(pa.int64())
    return pa.schema(
        [
            pa.field("run", pa.string(), nullable=False),
            pa.field("rollout_id", pa.string(), nullable=False),
            pa.field("chain_index", pa.int32(), nullable=False),
            pa.field("segment", pa.int32(), nullable=False),
            pa.field("segments", pa.int32(), nullable=False),
            pa.field("breaks", pa.string()),
            pa.field("whole", pa.bool_(), nullable=False),
            pa.field("calls_left_out", pa.int32(), nullable=False),
            pa.field("leaf_call_id", pa.string(), nullable=False),
            pa.field("token_ids", numbers, nullable=False),
            pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
            pa.field("log_probs", pa.list_(pa.float64()), nullable=False),
            pa.field("call_ids", texts, nullable=False),
            pa.field("call_starts", numbers, nullable=False),
            pa.field("generation_starts", numbers, nullable=False),
            pa.field("generation_lengths", numbers, nullable=False),
            pa.field("weight_versions", numbers, nullable=False),
            pa.field("recorded_weight_versions", texts, nullable=False),
            pa.field("routed_experts", pa.list_(pa.large_string()), nullable=False),
            pa.field("models", texts, nullable=False),
            pa.field("parent_resolutions", texts, nullable=False),
            pa.field("response_ids", texts, nullable=False),
            pa.field("reward", pa.float64()),
            pa.field("source", pa.string(), nullable=False),
            pa.field("snapshot_id", pa.string(), nullable=False),
            pa.field("version", pa.int64(), nullable=False),
            pa.field("incomplete", pa.bool_(), nullable=False),
            pa.field("payload_sha256", texts, nullable=False),
            pa.field("digest", pa.string(), nullable=False),
            pa.field("exported_by", pa.string(), nullable=False),
        ]
    )


class _Lists:
    """A column of lists of numbers, gathered in the memory that pyarrow then takes as it is: exact in every bit."""

    def __init__(self, code: str) -> None:
        self._code = code
        self.clear()

    def clear(self) -> None:
        self.values: array[Any] = array(self._code)
        self._offsets = array("i", [0])

    def add(self, values: array[Any]) -> None:
        self.values.extend(values)
        self._offsets.append(len(self.values))

    def column(self, pa: Any, kind: Any) -> Any:
        values = pa.Array.from_buffers(kind.value_type, len(self.values), [None, pa.py_buffer(self.values)])
        offsets = pa.Array.from_buffers(pa.int32(), len(self._offsets), [None, pa.py_buffer(self._offsets)])
        return pa.ListArray.from_arrays(offsets, values, type=kind)


def _column(pa: Any, kind: Any, values: Sequence[Any]) -> Any:
    """Return Python values, None for null, as a column of this type.

    Not by `pyarrow.array`, which imports pandas where that is installed: 45 MB, of which nothing is used.
    """
    present = [value is not None for value in values]
    validity = None if all(present) else pa.py_buffer(_bits(present))
    buffers: list[Any]
    children = None
    match kind:
        case _ if pa.types.is_list(kind):
            buffers = [_offsets(values)]
            children = [_column(pa, kind.value_type, list(chain.from_iterable(values)))]
        case _ if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            texts = [(value or "").encode() for value in values]
            buffers = [_offsets(texts, "i" if pa.types.is_string(kind) else "q"), b"".join(texts)]
        case _ if pa.types.is_boolean(kind):
            buffers = [_bits(values)]
        case _:
            buffers = [array(_CODES[str(kind)], [0 if value is None else value for value in values])]
    return pa.Array.from_buffers(
        kind, len(values), [validity, *map(pa.py_buffer, buffers)], children=children
    )


def _offsets(values: Sequence[Sequence[Any]], code: str = "i") -> array[int]:
    return array(code, accumulate(map(len, values), initial=0))


def _bits(values: Sequence[bool]) -> bytes:
    """Return one bit for each, the first one lowest, as Arrow has them."""
    packed = bytearray((len(values) + 7) // 8)
    for index, value in enumerate(values):
        packed[index // 8] |= bool(value) << index % 8
    return bytes(packed)


class ParquetPart:
    """One Parquet file in the making. It holds at most about one row group, and one rollout, in memory."""

    def __init__(
        self, folder: ExportFolder, number: int, *, rules: RowRules, rewards: Rewards, exported_by: str
    ) -> None:
        self.rows = 0
        self.size = 0
        self._pa, parquet = require_pyarrow()
        self._folder = folder
        self._name = f"part-{number:05}.parquet"
        self._rules = rules
        self._rewards = rewards
        self._exported_by = exported_by
        self._lists = {"token_ids": _Lists("q"), "loss_mask": _Lists("b"), "log_probs": _Lists("d")}
        self._others: list[dict[str, Any]] = []
        self._routes = 0
        self._stream = folder.open_temporary()
        self._writer = parquet.ParquetWriter(
            self._stream,
            schema(),
            compression="zstd",
            # Arrow's own pool keeps what it was given, for ever.
            memory_pool=self._pa.system_memory_pool(),
            # Not for numbers: nearly every log probability is another one.
            use_dictionary=[
                f"{field.name}.list.element" if field.name in _NESTED else field.name
                for field in schema()
                if field.name in _NESTED or field.type == self._pa.string()
            ],
        )

    def add(self, rollout: FrozenRollout) -> tuple[Exported | None, list[LeftOut]]:
        """Add the chains of a rollout; return what the file now holds of it, and what it does not.

        Raises CorruptEntryError, with nothing added, for rows that are not what was written.
        """
        made = rows_of(rollout, self._rules)
        if made.shape is None:
            return None, list(made.left_out)
        rows = tokens = trained = not_finite = routes_left_out = 0
        for each in made.chains:
            routes_left_out += self._add_row(rollout, rows, each, made.shape)
            rows += 1
            tokens, trained = tokens + len(each.token_ids), trained + sum(each.loss_mask)
            not_finite += count_not_finite(each.log_probs)
        exported = Exported.of(
            rollout,
            made.shape,
            calls=len(made.calls),
            rows=rows,
            tokens=tokens,
            trained_tokens=trained,
            not_finite_log_probs=not_finite,
            routes_left_out=routes_left_out,
        )
        return exported, list(made.left_out)

    def finish(self) -> None:
        """Close the file, to be published."""
        self._flush()
        self._writer.close()
        self._folder.close_temporary(self._stream, self._name, rows=self.rows)

    def abandon(self) -> None:
        """Let go of the file, which stays unfinished."""
        # It writes the end of a file that nobody will read, for which there may be no room.
        with contextlib.suppress(OSError):
            self._writer.close()
        self._folder.discard(self._stream)

    def _add_row(self, rollout: FrozenRollout, index: int, chain: Chain, shape: Shape) -> int:
        """Add a row; return of how many calls it does not have the routed experts, for they are too large."""
        links = chain.links
        routes = [link.engine.routed_experts for link in links]
        size = sum(len(each) for each in routes if each is not None)
        left_out = 0
        if size > _MOST_ROUTES:
            left_out, size = len(routes) - routes.count(None), 0
            routes = [None] * len(routes)
        self._lists["token_ids"].add(chain.token_ids)
        self._lists["loss_mask"].add(chain.loss_mask)
        self._lists["log_probs"].add(chain.log_probs)
        self._others.append(
            {
                "run": rollout.key.run,
                "rollout_id": rollout.key.rollout_id,
                "chain_index": index,
                "segment": chain.segment,
                "segments": shape.segments,
                "breaks": chain.broke,
                "whole": shape.whole,
                "calls_left_out": shape.calls_left_out,
                "leaf_call_id": links[-1].model_call_id,
                "call_ids": [link.model_call_id for link in links],
                "call_starts": [link.start for link in links],
                "generation_starts": [link.generation_start for link in links],
                "generation_lengths": [link.generation_len for link in links],
                "weight_versions": [link.engine.weight_version for link in links],
                "recorded_weight_versions": [link.engine.recorded_version for link in links],
                "routed_experts": routes,
                "models": [link.model for link in links],
                "parent_resolutions": [link.parent_resolution for link in links],
                "response_ids": [link.response_id for link in links],
                "reward": self._rewards.of(rollout.key),
                "source": chain.source,
                "snapshot_id": rollout.snapshot_id,
                "version": rollout.version,
                "incomplete": rollout.incomplete,
                "payload_sha256": [link.payload_sha256 for link in links],
                "digest": chain.digest,
                "exported_by": self._exported_by,
            }
        )
        self.rows += 1
        self.size += len(chain.token_ids) * _BYTES_PER_TOKEN + size
        self._routes += size
        if len(self._lists["token_ids"].values) >= _TOKENS_PER_GROUP or self._routes >= _ROUTES_PER_GROUP:
            self._flush()
        return left_out

    def _flush(self) -> None:
        if not self._others:
            return
        columns = [
            self._lists[field.name].column(self._pa, field.type)
            if field.name in self._lists
            else _column(self._pa, field.type, [row[field.name] for row in self._others])
            for field in schema()
        ]
        self._writer.write_table(self._pa.Table.from_arrays(columns, schema=schema()))
        self._others.clear()
        self._routes = 0
        for lists in self._lists.values():
            lists.clear()
