"""How far a verification came, in a small file, so that it can go on after an interruption."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import InvalidRecordError
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.selection import RolloutFilter
from tokencustody.verify.findings import Counts, Finding, Found, Rule

_FORMAT = 1


@dataclass(slots=True)
class Position:
    """What was verified up to and including the rollout `after`, in the order of the database, and in how long."""

    after: RolloutKey | None = None
    found: Found = field(default_factory=Found)
    seconds: float = 0.0


class Checkpoint:
    """The file of one verification: of a database and a filter."""

    def __init__(self, path: str | os.PathLike[str], url: DatabaseUrl, wanted: RolloutFilter) -> None:
        self._path = Path(path)
        self._of = json.loads(
            json.dumps({"format": _FORMAT, "database": url.display, "filter": asdict(wanted)}, default=str)
        )

    def load(self) -> Position:
        """Return the position that was saved, or the beginning when there is no file.

        Raises InvalidRecordError for a file that is no checkpoint, or that of another verification.
        """
        try:
            saved = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return Position()
        except (OSError, ValueError) as exc:
            raise InvalidRecordError(
                f"the checkpoint {self._path} cannot be read ({type(exc).__name__}); name another file, or remove it "
                "to begin anew"
            ) from None
        for name, value in self._of.items():
            if not isinstance(saved, dict) or saved.get(name) != value:
                raise InvalidRecordError(
                    f"{self._path} is the checkpoint of another verification: its {name} is another; name another "
                    "file, or remove it to begin anew"
                )
        try:
            return _position(saved)
        except (KeyError, TypeError, ValueError):
            raise InvalidRecordError(
                f"the checkpoint {self._path} is damaged; remove it to begin anew"
            ) from None

    def save(self, position: Position) -> None:
        """Replace the file in one step. Raises OSError."""
        after = None if position.after is None else position.after.columns()
        document = self._of | {
            "after": after,
            "seconds": position.seconds,
            "counts": asdict(position.found.counts),
            "findings": [asdict(finding) for finding in position.found.findings],
        }
        replace_file(self._path, json.dumps(document))

    def remove(self) -> None:
        """Remove the file of a verification that is done."""
        self._path.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all, also after a power cut. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _position(saved: dict[str, Any]) -> Position:
    after = saved["after"]
    findings = [Finding(**{**each, "rule": Rule(each["rule"])}) for each in saved["findings"]]
    return Position(
        None if after is None else RolloutKey(**after),
        Found(Counts(**saved["counts"]), findings),
        float(saved["seconds"]),
    )
