"""What a person decides about rows where a rollout alone does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from tokencustody.errors import InvalidRecordError
from tokencustody.records import shown
from tokencustody.states import OnBreak, SharedCalls, Siblings

Kind = TypeVar("Kind", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are made of calls. Raises InvalidRecordError that names a rule of no sense."""

    shared_calls: SharedCalls = SharedCalls.FIRST
    on_break: OnBreak = OnBreak.SPLIT
    siblings: Siblings = Siblings.SETTLE

    def __post_init__(self) -> None:
        for name, kind in (("shared_calls", SharedCalls), ("on_break", OnBreak), ("siblings", Siblings)):
            object.__setattr__(self, name, one_of(kind, getattr(self, name), name))


def one_of(kind: type[Kind], value: Any, name: str) -> Kind:
    """Return the word that `value` is, also when it came as plain text. Raises InvalidRecordError that names it."""
    if value not in list(kind):
        raise InvalidRecordError(f"{name} must be one of {', '.join(kind)}, not {shown(value)}")
    return kind(value)
