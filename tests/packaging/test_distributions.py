"""What a release hands out, whole and nothing else: a source archive, the wheel that is built from it, one version."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from tokencustody.schema import migrate

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"{PROJECT['name']}-{PROJECT['version']}"
PAGES = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"]
# All in one worker, so that everything is built once.
pytestmark = pytest.mark.xdist_group("packaging")


def run(folder: Path, *arguments: str, path: Path | None = None) -> str:
    """Run a module of Python in `folder`; with `path`, it finds the package there and not where the tests have it."""
    given = {} if path is None else {"PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=os.environ | given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, into: Path, *what: str) -> None:
    run(into, "build", "--no-isolation", "--outdir", str(into), *what, str(source))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel, made as a release makes them: the wheel from the archive."""
    folder = tmp_path_factory.mktemp("built")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def archive(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(built / f"{NAME}.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked, which is all that an installation does."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(wheel, folder, "zip")
    return folder


def files(folder: Path) -> dict[str, str]:
    """Return the hash of each file by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_its_types_and_its_revisions_and_nothing_else(installed: Path) -> None:
    held = files(installed)
    package = {f"tokencustody/{name}": sha256 for name, sha256 in files(ROOT / "src/tokencustody").items()}
    beside = {f"{NAME}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    assert held.keys() - package.keys() == {*beside, f"{NAME}.dist-info/licenses/LICENSE"}
    assert package.items() <= held.items()
    assert "tokencustody/py.typed" in held
    versions = "tokencustody/schema/migrations/versions"
    assert {f"{versions}/{revision}.py" for revision in migrate.REVISIONS} <= held.keys()


def test_the_wheel_of_a_checkout_is_that_of_its_source_archive(wheel: Path, tmp_path: Path) -> None:
    build(ROOT, tmp_path, "--wheel")
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_an_unpacked_archive_has_what_a_checkout_has(archive: Path) -> None:
    folders = ("src", "tests", "benchmarks", "campaigns", "scripts", "docs")
    for folder in folders:
        assert files(archive / folder) == files(ROOT / folder)
    for page in PAGES:
        assert (archive / page).read_bytes() == (ROOT / page).read_bytes()
    assert files(archive / "migrations") == files(archive / "src/tokencustody/schema/migrations")


def test_alembic_works_in_an_unpacked_archive(archive: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'captures.db'}"
    assert run(archive, "alembic", "heads", path=archive / "src").split() == [migrate.HEAD, "(head)"]
    run(archive, "alembic", "-x", f"url={url}", "upgrade", "head", path=archive / "src")
    assert migrate.check(url) == []


def test_an_installed_wheel_makes_a_database(installed: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'captures.db'}"
    run(tmp_path, "tokencustody", "db", "upgrade", "--url", url, path=installed)
    assert migrate.check(url) == []


def test_every_place_that_tells_the_version_tells_that_of_the_project(
    installed: Path, archive: Path, tmp_path: Path
) -> None:
    version = PROJECT["version"]
    assert f"\nVersion: {version}\n" in (archive / "PKG-INFO").read_text()
    assert f"\nVersion: {version}\n" in (installed / f"{NAME}.dist-info" / "METADATA").read_text()
    assert run(tmp_path, "tokencustody", "--version", path=installed).split() == ["tokencustody", version]
    assert version in (ROOT / "CHANGELOG.md").read_text()
