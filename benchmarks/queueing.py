"""TransferQueue, which moves samples between the parts of a training loop in memory, for orientation.

It acknowledges what the memory of its actors holds: a put survives no crash, let alone a power cut. It is no dependency
of the benchmark, and is measured where it can be imported.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from statistics import median
from typing import Any

from benchmarks.calls import CALLS, independent_rollouts
from benchmarks.results import percentile
from benchmarks.timing import Stopwatch, settle, write_all
from benchmarks.workload import Bench, Workload
from tokencustody import TokenEntry

TRANSFER_QUEUE = "TransferQueue (in memory)"
NOT_INSTALLED = "TransferQueue: not installed: pip install TransferQueue==0.1.11"
# Of Ray's, which only count what its actors ask for: with fewer than that `init` waits for ever.
_LOGICAL_CPUS = 16


class TransferQueue(Workload):
    """Writers put the calls of `put-1`, `put-16` and `put-64`, and the results stand beside those."""

    name = "transfer-queue"
    stores = (TRANSFER_QUEUE,)

    def __init__(self, *, rollouts: dict[int, int], rounds: int) -> None:
        # Of each number of writers.
        self._counts = rollouts
        self.rounds = rounds if is_installed() else 0
        self._rollouts: list[list[dict[str, Any]]] = []
        self._stack = ExitStack()
        self._queue: Any = None

    def prepare(self, bench: Bench) -> None:
        if not is_installed():
            bench.results.note(NOT_INSTALLED)
            return
        bench.results.note(
            "TransferQueue acknowledges in memory: nothing of it is durable. It is given tensors, made before, by its "
            "async_kv_put, and runs last, for Ray's processes would take CPU from the others"
        )
        # Before either is imported, which reads them.
        os.environ.setdefault("TQ_NUM_THREADS", str(os.cpu_count() or 1))
        os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
        torch, ray = import_module("torch"), import_module("ray")
        self._queue = import_module("transfer_queue")
        ray.init(
            num_cpus=_LOGICAL_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._stack.callback(ray.shutdown)
        self._queue.init()
        self._stack.callback(self._queue.close)
        rollouts = independent_rollouts(max(self._counts.values()), 2_000, 500)
        self._rollouts = [[_sample(torch, entry) for entry in calls] for calls in rollouts]

    def measure(self, bench: Bench, store: str, turn: int) -> None:
        for writers, count in self._counts.items():
            asyncio.run(self._put_and_read(bench, store, writers, self._rollouts[:count]))

    def finish(self) -> None:
        self._stack.close()
        self._rollouts = []

    async def _put_and_read(
        self, bench: Bench, store: str, writers: int, rollouts: list[list[dict[str, Any]]]
    ) -> None:
        partition = f"{writers} writers"
        queue = self._queue

        async def put(sample: dict[str, Any]) -> None:
            await queue.async_kv_put(partition_id=partition, **sample)

        async def read(keys: list[str]) -> None:
            data = await queue.async_kv_batch_get(keys=keys, partition_id=partition)
            if len(data) != CALLS:
                raise RuntimeError(f"{store}: it has {len(data)} of {CALLS} calls")

        keys = [[sample["key"] for sample in samples] for samples in rollouts]
        settle()
        with Stopwatch() as watch:
            milliseconds = await write_all(rollouts, writers, put)
        with Stopwatch() as reading:
            await write_all([[each] for each in keys], writers, read)
        await queue.async_kv_clear(keys=[*chain.from_iterable(keys)], partition_id=partition)
        bench.results.add(
            f"put-{writers}",
            store,
            put_rate=len(milliseconds) / watch.seconds,
            put_p50=median(milliseconds),
            put_p99=percentile(milliseconds, 0.99),
            client_cpu=1000 * watch.cpu_seconds / len(milliseconds),
            freeze_rate=len(rollouts) / reading.seconds,
        )


def is_installed() -> bool:
    """Return whether TransferQueue can be measured."""
    return find_spec("transfer_queue") is not None


def _sample(torch: Any, entry: TokenEntry) -> dict[str, Any]:
    """Return the key, fields and tag of a call."""
    rest = dict(entry)
    columns = {
        "prompt_token_ids": torch.tensor(rest.pop("prompt_token_ids")),
        "generation_token_ids": torch.tensor(rest.pop("generation_token_ids")),
        "generation_log_probs": torch.tensor(rest.pop("generation_log_probs"), dtype=torch.float64),
    }
    return {
        "key": f"{entry.rollout_id}/{entry.model_call_id}",
        "fields": {**columns, "rest": json.dumps(rest)},
        "tag": {"rollout_id": entry.rollout_id},
    }
