"""Rows for a trainer as NumPy arrays. NumPy is imported when it is needed, and not before."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokencustody.chains.chains import Chain
from tokencustody.chains.reading import FrozenRollout
from tokencustody.chains.reasons import LeftOut
from tokencustody.chains.rows import rows_of
from tokencustody.chains.rules import RowRules

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def require_numpy() -> Any:
    """Return NumPy. Raises ImportError that says how to install it."""
    try:
        return import_module("numpy")
    except ModuleNotFoundError as exc:
        raise ImportError(
            "tokencustody.training needs numpy: pip install 'tokencustody[training]'", name=exc.name
        ) from None


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One row, as an export writes it to Parquet: its fields have the names and the meaning of the columns there.

    `token_ids` (int64), `loss_mask` (int8; 1 where a sampled token is to be trained in this row) and `log_probs`
    (float64, natural logarithms in every bit; 0.0 where the mask is 0) have one value for each token. `call_ids`,
    `call_starts`, `generation_starts`, `generation_lengths` (int64, in tokens), `weight_versions` and `routed_experts`
    have one for each call, from the first to the leaf. The arrays are the row's own, and may be written to.
    """

    rollout_id: str
    chain_index: int
    segment: int
    breaks: str | None
    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int8]
    log_probs: NDArray[np.float64]
    call_ids: tuple[str, ...]
    call_starts: NDArray[np.int64]
    generation_starts: NDArray[np.int64]
    generation_lengths: NDArray[np.int64]
    weight_versions: tuple[int | None, ...]
    routed_experts: tuple[str | None, ...]
    source: str
    digest: str

    @classmethod
    def of(cls, rollout_id: str, index: int, chain: Chain) -> TrainingRow:
        """Return the row of a chain, over the memory that the chain has."""
        links = chain.links
        return cls(
            rollout_id=rollout_id,
            chain_index=index,
            segment=chain.segment,
            breaks=chain.broke,
            token_ids=_over(chain.token_ids),
            loss_mask=_over(chain.loss_mask),
            log_probs=_over(chain.log_probs),
            call_ids=tuple(link.model_call_id for link in links),
            call_starts=_over(array("q", [link.start for link in links])),
            generation_starts=_over(array("q", [link.generation_start for link in links])),
            generation_lengths=_over(array("q", [link.generation_len for link in links])),
            weight_versions=tuple(link.engine.weight_version for link in links),
            routed_experts=tuple(link.engine.routed_experts for link in links),
            source=chain.source,
            digest=chain.digest,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRollout:
    """A frozen rollout as rows, at exactly the snapshot and version that `TrainingSource.drop` takes.

    `left_out` says of each call that is in no row why, or of the rollout, which then has no rows. `whole`: the rollout
    lost nothing but answers that the agent never received. `is_held`: every token that was sampled in it is in a row.
    """

    rollout_id: str
    snapshot_id: str
    version: int
    rows: tuple[TrainingRow, ...]
    left_out: tuple[LeftOut, ...]
    whole: bool = False
    is_held: bool = False

    @classmethod
    def of(cls, rollout: FrozenRollout, rules: RowRules) -> TrainingRollout:
        """Return the rows of a rollout. Raises CorruptEntryError for what is not what was written."""
        name = rollout.key.rollout_id
        made = rows_of(rollout, rules)
        return cls(
            rollout_id=name,
            snapshot_id=rollout.snapshot_id,
            version=rollout.version,
            rows=tuple(TrainingRow.of(name, index, chain) for index, chain in enumerate(made.chains)),
            left_out=tuple(made.left_out),
            whole=made.shape is not None and made.shape.whole,
            is_held=made.shape is not None and made.shape.is_held,
        )


def _over(column: array[Any]) -> NDArray[Any]:
    # By its size: the type code "q" is NumPy's longlong, which some programs do not take for an int64.
    kind = "f" if column.typecode == "d" else "i"
    found: NDArray[Any] = require_numpy().frombuffer(column, dtype=f"{kind}{column.itemsize}")
    return found
