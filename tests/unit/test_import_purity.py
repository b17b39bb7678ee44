import subprocess
import sys

import pytest

pytestmark = pytest.mark.quick

PURE_MODULES = [
    "tokencustody",
    "tokencustody.errors",
    "tokencustody.records",
    "tokencustody.bodies",
    "tokencustody.fingerprint",
    "tokencustody.fingerprint_v3",
    "tokencustody.lineage",
    "tokencustody.protocols",
    "tokencustody.staging",
    "tokencustody.staging.digest",
    "tokencustody.staging.records",
    "tokencustody.staging.protocols",
    "tokencustody.staging.capture",
    "tokencustody.staging.conformance",
    "tokencustody.staging.adapters.megatron",
    "tokencustody.staging.adapters.vllm",
    "tokencustody.staging.rebuild",
    "tokencustody.staging.routes",
    "tokencustody.staging.terminal",
]
HEAVY = [
    "sqlalchemy",
    "alembic",
    "asyncpg",
    "fastapi",
    "aiohttp",
    "torch",
    "ray",
    "numpy",
    "typer",
]


@pytest.mark.parametrize("module", PURE_MODULES)
def test_a_pure_module_loads_no_database_driver_and_no_server(module: str) -> None:
    program = f"import {module}, sys; print(*sorted({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
