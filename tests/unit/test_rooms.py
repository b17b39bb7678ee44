"""The packages stand on floors: each imports only what lies below it, so every job can be read by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SOURCE = Path(__file__).parents[2] / "src" / "tokencustody"
# From the ground up; rooms of one floor do not know each other. The modules beside the rooms are the ground.
FLOORS = (
    ("",),
    ("terminal", "staging"),
    ("codec",),
    ("database",),
    ("schema",),
    ("roles", "txn"),
    ("spill",),
    ("store",),
    ("chains", "overview"),
    ("verify", "export", "gym_import", "copying", "retention", "backup", "sql_prompt", "training"),
    ("control", "conformance", "integrations"),
    ("demo",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LARGEST_ROOM = 4_000
ROOMS = sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
# These open the house from outside, and no room imports them.
DOORS = {"__init__", "__main__"}
GROUND = {path.stem for path in SOURCE.glob("*.py")} - DOORS


def modules(room: str) -> list[Path]:
    if not room:
        return [path for path in SOURCE.glob("*.py") if path.stem not in DOORS]
    return sorted((SOURCE / room).rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the rooms that are imported when the program runs, wherever in a module that stands."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.ImportFrom(level=level) if level:
                raise AssertionError(f"not from the top: {ast.unparse(node)}")
            case ast.ImportFrom(module="tokencustody", names=names):
                for name in names:
                    assert name.name in {*ROOMS, *GROUND}, f"through the front door: {ast.unparse(node)}"
                    yield name.name if name.name in ROOMS else ""
            case ast.ImportFrom(module=str(module)) if module.startswith("tokencustody."):
                room = module.split(".")[1]
                yield room if room in ROOMS else ""
            case ast.Import(names=names):
                assert not [name for name in names if name.name.startswith("tokencustody")], ast.unparse(node)
            case ast.Call(func=ast.Name(id="names"), keywords=where):
                # What a package imports when it is first asked for: see `lazy`.
                for each in where:
                    room = str(ast.literal_eval(each.value)).split(".")[0]
                    yield room if room in ROOMS else ""
        yield from imports(node)


def test_every_room_has_its_floor() -> None:
    assert set(FLOOR_OF) == {"", *ROOMS}


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_a_room_imports_only_from_floors_below(room: str) -> None:
    upward = [
        f"{path.relative_to(SOURCE)} imports {other or 'a module of the ground'}"
        for path in modules(room)
        for other in imports(ast.parse(path.read_text()))
        if other != room and FLOOR_OF[other] >= FLOOR_OF[room]
    ]
    assert not upward


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_a_room_says_what_it_holds_and_is_small_enough_to_be_known(room: str) -> None:
    assert sum(path.read_text().count("\n") for path in modules(room)) <= LARGEST_ROOM
    if room:
        assert ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text()))
