"""Which commands a person can run with which role, and that the others end in one line."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.roles.secured import Secured, secured_database
from tests.support.postgres import Server
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.cli import main
from tokencustody.roles.granting import grant
from tokencustody.states import Role
from tokencustody.terminal.needs import NEEDS

ROLES = {
    "worker": (Role.WORKER, ["here"]),
    "trainer": (Role.TRAINER, ["here"]),
    "auditor": (Role.AUDITOR, []),
}
# Who may run which, as docs/roles.md says.
COMMANDS = {
    "db current": {"worker", "trainer", "auditor"},
    "db check": {"worker", "trainer", "auditor"},
    "db roles": {"worker", "trainer", "auditor"},
    "rollouts": {"worker", "trainer", "auditor"},
    "show {rollout} --run here": {"worker", "trainer", "auditor"},
    "runs": {"worker", "trainer", "auditor"},
    "sql 'SELECT count(*) FROM audit_rollouts'": {"auditor"},
    "sql \"SELECT audit_prompt_token_ids('here', '{rollout}', 'call-0')\"": {"worker", "trainer"},
    "verify": {"worker", "trainer"},
    "verify --run here": {"worker", "trainer"},
    "copy --to {folder}.db --run here": {"worker", "trainer"},
    "export {folder} --run here --format gym": {"trainer"},
    "retire {rollout} --run here --yes": {"trainer"},
    "delete {rollout} --run here --yes": set(),
    "conformance --check put_then_freeze": set(),
}


@pytest.fixture(scope="module")
def users(postgres: Server) -> Iterator[tuple[Secured, dict[str, str]]]:
    async def fill(url: str) -> None:
        for run in ("here", "elsewhere"):
            async with open_store(url, run=run) as store:
                # One for each command and user, for some let it go.
                for number in range(len(COMMANDS) * len(ROLES)):
                    for turn in linear_rollout(2, rollout_id=f"rollout-{number}"):
                        await store.sink.put(turn.entry)
                    await store.source.freeze(f"rollout-{number}")

    with secured_database(postgres, *ROLES) as (database, names):
        asyncio.run(fill(database.url))
        users = dict(zip(ROLES, names, strict=True))
        for name, (role, runs) in ROLES.items():
            grant(database.url, role, users[name], runs)
        yield database, {name: database.url_as(user) for name, user in users.items()}


@pytest.mark.parametrize("user", ROLES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works_for_those_whose_it_is_and_else_says_in_one_line_what_was_denied(
    users: tuple[Secured, dict[str, str]],
    command: str,
    user: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = list(COMMANDS).index(command) * len(ROLES) + list(ROLES).index(user)
    filled = command.format(rollout=f"rollout-{number}", folder=tmp_path / "export")
    monkeypatch.setenv("TOKENCUSTODY_URL", users[1][user])
    monkeypatch.setattr(sys, "argv", ["tokencustody", *shlex.split(filled)])
    with pytest.raises(SystemExit) as exited:
        main()
    said = capsys.readouterr()
    if user in COMMANDS[command]:
        assert exited.value.code in (0, None), said.err
        assert "elsewhere" not in said.out or user == "auditor"
    else:
        assert exited.value.code not in (0, None)
        errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "permission denied for " in errors[0]
        words = command.split()[0]
        if words != "sql":
            assert f"`tokencustody {words}` needs {NEEDS[words]}" in errors[0]
