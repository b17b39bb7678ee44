"""Frozen rollouts as rows of NumPy arrays, straight from the database, for a trainer."""

from typing import TYPE_CHECKING

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.chains.reasons import LeftOut, Why
    from tokencustody.chains.rules import RowRules
    from tokencustody.states import OnBreak, SharedCalls, Siblings
    from tokencustody.training.rows import TrainingRollout, TrainingRow
    from tokencustody.training.source import TrainingSource, read_rollouts

__all__ = [
    "LeftOut",
    "OnBreak",
    "RowRules",
    "SharedCalls",
    "Siblings",
    "TrainingRollout",
    "TrainingRow",
    "TrainingSource",
    "Why",
    "read_rollouts",
]

__getattr__ = names(
    __name__,
    LeftOut="chains.reasons",
    OnBreak="states",
    RowRules="chains.rules",
    SharedCalls="states",
    Siblings="states",
    TrainingRollout="training.rows",
    TrainingRow="training.rows",
    TrainingSource="training.source",
    Why="chains.reasons",
    read_rollouts="training.source",
)
