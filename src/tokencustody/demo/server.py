"""The child process that holds the model: llama.cpp's HTTP server on a free loopback port.

It is a process of its own because loading the model holds the interpreter lock, and because a crash of the
engine must not take the caller down. It prints its address on one line and ends when its standard input does,
so it never outlives the process that started it.
"""

from __future__ import annotations

import os
import sys


def serve(model_path: str, slots: int, context: int, threads: int) -> None:
    """Serve the GGUF file at `model_path`, `slots` sequences of `context` tokens each, and exit when stdin ends."""
    import xllamacpp  # type: ignore[import-untyped,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = model_path
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.cpuparams.n_threads = threads
    params.ui = False
    params.endpoint_slots = False
    params.cache_ram_mib = 0
    params.fit_params = False
    params.verbosity = -1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    # Not by releasing the server: that first finishes what is being sampled, which nobody waits for any more.
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1], *(int(argument) for argument in sys.argv[2:5]))
