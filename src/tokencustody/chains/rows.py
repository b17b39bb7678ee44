"""What of a rollout is trained, wherever its tokens lie, and what is not, each with its reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tokencustody.chains.chains import Chain, Forest, shape_of
from tokencustody.chains.reading import FrozenRollout, making_sense
from tokencustody.chains.reasons import LeftOut, Shape, Why
from tokencustody.chains.rules import RowRules
from tokencustody.chains.staged import staged_chain, staged_left_out


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a rollout, each made when it is asked for, the calls in them, and what is in none of them.

    `shape` is None where the rollout is left out as a whole. What sampled nothing has a shape, and no row.
    """

    left_out: Sequence[LeftOut]
    shape: Shape | None = None
    calls: Collection[str] = ()
    chains: Iterable[Chain] = ()


def rows_of(rollout: FrozenRollout, rules: RowRules) -> Rows:
    """Return the rows of a rollout: of its complete records, else of its staged calls.

    Raises CorruptEntryError for rows of the database that are not what was written.
    """
    if rollout.entries and rollout.lost:
        return Rows([LeftOut.of(rollout.key, row.reason, row.model_call_id) for row in rollout.lost])
    chains: Iterable[Chain]
    with making_sense(rollout.key):
        forest = Forest(rollout, rules)
        if rollout.is_staged_only:
            found, left_out = staged_chain(rollout)
            chains = () if found is None else (found,)
            held = {link.model_call_id for each in chains for link in each.links}
        else:
            chains, held = forest.chains(), forest.calls
            left_out = forest.left_out + staged_left_out(rollout, Why.STAGED_BESIDE_RECORDS)
        shape = shape_of(rollout, held, left_out, forest)
    if not held and (forest.is_masked or not rollout.entries or not shape.is_held):
        return Rows(left_out or [LeftOut.of(rollout.key, Why.NO_CALLS)])
    return Rows(left_out, shape, held, chains)
