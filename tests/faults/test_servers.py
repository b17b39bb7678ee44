"""The servers and disks of a campaign: they do what they are told, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from campaigns.servers import PostgresCluster
from tests.support.entries import make_entry
from tests.support.machine import needs_mounts
from tokencustody import open_store
from tokencustody.database.registry import open_engines

ROOT = Path(__file__).resolve().parents[2]


async def test_a_server_that_is_crashed_killed_and_rid_of_its_sessions_keeps_what_was_acknowledged() -> None:
    rng = random.Random(5)
    with PostgresCluster() as cluster:
        url = cluster.create_database("captures")
        async with open_store(url) as store:
            await store.sink.put(make_entry(model_call_id="call-0"))
            assert cluster.terminate_sessions(rng) == 1
            await store.sink.put(make_entry(model_call_id="call-1"))
            cluster.restart_immediate()
            await store.sink.put(make_entry(model_call_id="call-2"))
            cluster.kill_postmaster()
            with pytest.raises(OSError, match="onnect"):
                cluster.fetch("SELECT 1")
            cluster.start()
            await store.sink.put(make_entry(model_call_id="call-3"))
            assert len((await store.source.freeze("rollout-1")).entries) == 4
            assert store.stats()["retries"] > 0
        home = cluster.home
    assert not home.exists()
    assert not open_engines()


# A signal that comes just before one long wait would be noticed at its end.
_HOLD = """
import time
from campaigns.bouncer import PgBouncer
from campaigns.disks import PowerDisk
from campaigns.servers import PostgresCluster

with PowerDisk(1 << 28) as disk, PostgresCluster(disk.folder) as cluster, PgBouncer(cluster, "postgres") as bouncer:
    print(disk.folder, cluster.home, (cluster.home / "pid").read_text().strip(), flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda end: end.name)
def test_nothing_is_left_running_or_mounted_when_a_campaign_is_ended(end: signal.Signals) -> None:
    needs_mounts()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as campaign:
        assert campaign.stdout is not None
        mounted, home, server = campaign.stdout.readline().split()
        assert is_running(int(server))
        campaign.send_signal(end)
    give_up = time.monotonic() + 30
    while is_running(int(server)) or Path(home).exists() or Path(mounted).parent.exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)
    assert mounted not in Path("/proc/mounts").read_text()


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False
