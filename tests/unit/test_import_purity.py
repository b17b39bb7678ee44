import subprocess
import sys
from pathlib import Path

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


def loaded(program: str, *arguments: str) -> set[str]:
    """Return the names of the modules that a process has loaded when it ends."""
    program += "\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", PURE_MODULES)
def test_a_pure_module_loads_no_database_driver_and_no_server(module: str) -> None:
    assert not loaded(f"import {module}") & set(HEAVY)


@pytest.mark.parametrize("package", ["tokencustody", "tokencustody.staging"])
def test_a_package_loads_what_it_is_asked_for(package: str) -> None:
    assert not {"pydantic", "tokencustody.records", "tokencustody.staging.records"} & loaded(
        f"import {package}"
    )
    each = f"import {package} as package; assert {{*package.__all__}} == {{*dir(package)}}"
    assert "pydantic" in loaded(f"{each}; [getattr(package, name) for name in package.__all__]")
    assert f"{package}.records" in loaded(f"import {package}; {package}.records")


def test_a_store_loads_nothing_of_the_other_database_nor_what_makes_tables_that_are_there(
    tmp_path: Path,
) -> None:
    url = str(tmp_path / "captures.db")
    use = """
import asyncio, sys
from tokencustody import open_store

async def use():
    async with open_store(sys.argv[1]) as store:
        await store.source.freeze("r")

asyncio.run(use())"""
    of_postgresql = {"asyncpg", "sqlalchemy.dialects.postgresql", "sqlalchemy.ext.asyncio", "sqlalchemy.orm"}
    # Alembic itself loads SQLAlchemy's part for PostgreSQL.
    assert "alembic" in loaded(use, url)
    assert not {"alembic", *of_postgresql} & loaded(use, url)


def test_a_command_is_loaded_without_the_others_and_without_what_does_its_work() -> None:
    verify = """
import sys
from tokencustody.cli import main

sys.argv[1:] = ["verify", "--help"]
try:
    main()
except SystemExit:
    pass"""
    modules = loaded(verify)
    commands = {name for name in modules if name.startswith("tokencustody.") and name.endswith("command")}
    assert commands == {"tokencustody.verify.command", "tokencustody.schema.command"}
    assert not {"sqlalchemy", "asyncio", "tokencustody.records", "tokencustody.errors"} & modules
