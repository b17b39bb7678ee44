"""What engines record beside the tokens of a call: the version of the weights, and the experts that were chosen.

Engines write both in several forms. The column for trainers has what can be said for certain, a column beside it what
was recorded, so that nothing is guessed and nothing lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokencustody.records import TokenEntry

_MAX_INT64 = 2**63 - 1
_NAMES = ("weight_version", "weight_versions")


@dataclass(frozen=True, slots=True)
class EngineFields:
    """What an engine recorded of one call.

    `weight_version` is the one version by which the call was sampled, if it is one and an integer; `recorded_version`
    is the JSON of what was recorded, where that is more than the integer or its digits: of an object by field, where
    several fields hold it. `routed_experts` is the text
    that was recorded, or the JSON of what is no text.
    """

    weight_version: int | None
    recorded_version: str | None
    routed_experts: str | None


def engine_fields(entry: TokenEntry, ledger: Any | None) -> EngineFields:
    """Return the fields of a complete record, of which the ledger knows the weight version better."""
    recorded = _recorded_versions(entry)
    values = list(recorded.values())
    version = _one_version(values) if ledger is None else int(ledger.weight_version)
    is_all = all(type(value) in (int, str) and str(value) == str(version) for value in values)
    return EngineFields(
        weight_version=version,
        recorded_version=None if is_all else _json(recorded if len(values) > 1 else values[0]),
        routed_experts=routed_text(entry.routed_experts),
    )


def routed_text(recorded: Any) -> str | None:
    """Return recorded experts as text: an envelope or a base64 file as it is, anything else as JSON."""
    return recorded if recorded is None or isinstance(recorded, str) else _json(recorded)


def _recorded_versions(entry: TokenEntry) -> dict[str, Any]:
    fields = entry.model_extra or {}
    about = fields.get("meta_info")
    places = {"": fields, "meta_info.": about if isinstance(about, Mapping) else {}}
    return {
        within + name: place[name]
        for within, place in places.items()
        for name in _NAMES
        if place.get(name) is not None
    }


def _one_version(recorded: Any) -> int | None:
    """Return the version that a record names, if it names one that is an integer.

    A list holds versions, or spans of tokens that each have a `version`.
    """
    match recorded:
        case bool():
            return None
        case int():
            return recorded if abs(recorded) <= _MAX_INT64 else None
        case str():
            # No version has more digits, and Python refuses to read thousands of them.
            is_number = recorded.isascii() and recorded.isdigit() and len(recorded) < 20
            return _one_version(int(recorded)) if is_number else None
        case list():
            versions = {_one_version(each) for each in recorded}
            return versions.pop() if len(versions) == 1 else None
        case Mapping():
            named = [recorded.get(name) for name in ("version", "weight_version")]
            return _one_version([each for each in named if each is not None])
        case _:
            return None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
