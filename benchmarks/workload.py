"""What a workload is, and the sizes of a full and of a quick run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.machine import ServerCpu
from benchmarks.results import Results
from benchmarks.stores import Arena


@dataclass(frozen=True)
class Bench:
    """What every workload measures with."""

    arena: Arena
    results: Results
    server_cpu: ServerCpu


class Workload(ABC):
    """Something that is measured on each of `stores`, `rounds` times."""

    name: str
    stores: Sequence[str]
    rounds: int

    def prepare(self, bench: Bench) -> None:  # noqa: B027 - most have nothing to prepare
        """Make what is measured with, before the first round."""

    @abstractmethod
    def measure(self, bench: Bench, store: str, turn: int) -> None:
        """Measure one store once, and add what was found to the results."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what `prepare` took."""
