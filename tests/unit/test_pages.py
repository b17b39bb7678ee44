"""What the pages say of the code is there: rooms and their floors, files and names in them, errors, links, commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from tests.unit.test_rooms import FLOORS, ROOMS, SOURCE
from tokencustody.cli import app

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The room of modules that stand beside the rooms has no name of its own.
GROUND = "modules beside the rooms"


EACH_PAGE = [pytest.param(page, id=page.name) for page in PAGES]


# Only rooms that are gone, and those of today: an attribute of an object is written so too.
MODULE = re.compile(rf"`((?:sql|audit|{'|'.join(ROOMS)})\.[a-z]\w+)`")


@pytest.mark.parametrize("path", [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))])
def test_a_module_that_a_comment_names_is_there(path: str) -> None:
    for name in MODULE.findall((SOURCE / path).read_text()):
        room, _, module = name.partition(".")
        assert (SOURCE / room / f"{module}.py").exists() or (SOURCE / room / module).is_dir(), name


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def defines(body: list[ast.stmt], name: str) -> bool:
    first, _, rest = name.partition(".")
    for node in body:
        match node:
            case ast.ClassDef(name=found, body=inner) if found == first:
                return not rest or defines(inner, rest)
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if found == name:
                return True
            case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)):
                if found == name:
                    return True
    return False


@pytest.mark.parametrize("room", ROOMS)
def test_the_architecture_names_every_room_by_its_own_sentence(room: str) -> None:
    sentence = (ast.get_docstring(tree_of(SOURCE / room / "__init__.py")) or "").split("\n\n")[0]
    assert f"| `{room}/` | {' '.join(sentence.split())} |" in ARCHITECTURE.splitlines()


def test_the_picture_shows_the_floors_that_hold() -> None:
    ((_, picture),) = [block for block in FENCED.findall(ARCHITECTURE) if block[0] == "mermaid"]
    shown = {int(number): label for number, label in re.findall(r'floor(\d+)\["(.*?)"\]', picture)}
    assert shown == {
        number: " · ".join(room or GROUND for room in rooms) for number, rooms in enumerate(FLOORS)
    }
    assert re.findall(r"floor(\d+)(?= -->| *$)", picture, re.MULTILINE) == [
        str(number) for number in reversed(range(len(FLOORS)))
    ]


@pytest.mark.parametrize("reference", sorted(set(re.findall(r"`([\w/]+\.py::[\w.]+)`", ARCHITECTURE))))
def test_a_name_in_the_architecture_is_in_its_file(reference: str) -> None:
    path, _, name = reference.partition("::")
    assert defines(tree_of(SOURCE / path).body, name)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.py|\.sql|/))`", ARCHITECTURE))))
def test_a_path_in_the_architecture_is_there(path: str) -> None:
    # A room's own `command.py` stands for that of each.
    assert (SOURCE / path).exists() or list(SOURCE.glob(f"*/{path}"))


def test_the_architecture_tells_of_every_error_what_it_asks_of_a_caller() -> None:
    errors = {node.name for node in tree_of(SOURCE / "errors.py").body if isinstance(node, ast.ClassDef)}
    assert errors == set(re.findall(r"`(\w+Error)`", ARCHITECTURE.split("error (all in `errors.py`)", 1)[1]))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EACH_PAGE)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        to = (page.parent / path) if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            dead.append(target)
    assert not dead


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the words of each line that a console block lets a person type, without what is piped on."""
    for kind, block in FENCED.findall(page.read_text()):
        if kind != "console":
            continue
        for line in re.findall(r"^\$ (.*(?:\n {10,}.*)*)", block, re.MULTILINE):
            words = shlex.split(line, comments=True)
            yield [word for word in words if not re.fullmatch(r"\w+=.*", word, re.DOTALL)]


@pytest.mark.parametrize("page", EACH_PAGE)
def test_every_command_of_a_page_is_there_with_its_options(page: Path) -> None:
    for words in command_lines(page):
        program, *arguments = words or [""]
        if program.startswith("scripts/"):
            assert (ROOT / program).is_file(), program
        if program != "tokencustody":
            continue
        command = get_command(app)
        context = typer.Context(command)
        while isinstance(command, typer.core.TyperGroup) and arguments:
            asked = command.get_command(context, arguments[0])
            if asked is None:
                break
            command = asked
            arguments.pop(0)
            context = typer.Context(command, parent=context)
        assert not isinstance(command, typer.core.TyperGroup) or arguments in (["--version"], ["--help"]), (
            words
        )
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        known |= {option for parameter in command.get_params(context) for option in parameter.secondary_opts}
        asked = {word.partition("=")[0] for word in arguments if word.startswith("--")}
        assert asked <= known, words
