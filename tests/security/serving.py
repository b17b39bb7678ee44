"""A `tokencustody serve` process that the attacks of a whole module share."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from tests.control.serving import TOKEN


@contextlib.contextmanager
def serve_process(store_url: str) -> Iterator[str]:
    """Yield the URL of a server; at the end it must still be running and have written no traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tokencustody", "serve", "--port", "0"],
        env=os.environ | {"TOKENCUSTODY_AUTH_TOKEN": TOKEN, "TOKENCUSTODY_URL": store_url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        matched = re.search(r"on (http://\S+)\n", process.stdout.readline())
        assert matched
        yield matched[1]
        running = process.poll() is None
    finally:
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (running, process.returncode) == (True, 0)
    assert "Traceback" not in err, err
    assert TOKEN not in out + err
