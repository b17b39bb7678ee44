"""`tokencustody sql`, as a person or a script uses it: it answers, and nothing that is asked can change a database."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import probes
from tests.support.audited import RUN, fill
from tests.support.entries import make_entry
from tokencustody.cli import main
from tokencustody.database.url import parse_url
from tokencustody.schema import migrate
from tokencustody.sql_prompt import functions
from tokencustody.sql_prompt.queries import PostgresqlQueries, QueryError, SqliteQueries

Ask = Callable[..., tuple[object, str, str]]
HOSTILE = "[red]x[/red]\x1b[31m"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run the command; returns its exit code, output and error output."""

    def run(*arguments: str, typed: str = "") -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tokencustody", "sql", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as exited:
            main()
        return exited.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def url(store_url: str) -> str:
    fill(store_url)
    return store_url


def put(url: str, call: str) -> None:
    import asyncio

    from tokencustody import open_store

    async def write() -> None:
        async with open_store(url, run=RUN) as store:
            await store.sink.put(make_entry("hostile", call, prompt=list(range(2500))))

    asyncio.run(write())


QUERY = "SELECT rollout_id, calls, why FROM audit_rollouts WHERE rollout_id IN ('bad', 'clean') ORDER BY rollout_id"


def test_each_form_holds_the_same(ask: Ask, url: str) -> None:
    code, out, err = ask("--url", url, "--json", QUERY)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(row["rollout_id"], row["calls"]) for row in found] == [("bad", 1), ("clean", 1)]
    _, out, _ = ask("--url", url, "--csv", QUERY)
    assert [(row["rollout_id"], row["why"]) for row in csv.DictReader(io.StringIO(out))] == [
        (row["rollout_id"], row["why"]) for row in found
    ]
    _, out, _ = ask("--url", url, QUERY)
    assert out.splitlines()[0].split() == ["rollout_id", "calls", "why"]
    assert found[0]["why"] in out
    assert out.endswith("2 rows\n")


def test_a_script_comes_from_standard_input_and_stops_at_the_first_fault(ask: Ask, url: str) -> None:
    code, out, err = ask("--url", url, "--csv", typed="SELECT ';' AS one; -- a comment;\nSELECT 2 AS two")
    assert (code, out, err) == (0, "one\n;\ntwo\n2\n", "")
    code, out, err = ask("--url", url, "--csv", "SELECT 1 AS a; SELECT * FROM nowhere; SELECT 3 AS b")
    assert (code, out) == (1, "a\n1\n")
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert len(err.splitlines()) == 1


HIDDEN = {
    "sqlite": [
        "SELECT ';'",
        "SELECT 2 /* ; /* ; */",
        "SELECT [;] FROM (SELECT 3 AS [;])",
        "SELECT ';;' -- ;\n",
    ],
    "postgresql": [
        "SELECT $$;$$",
        "SELECT $x$ a;b $$ $x$",
        "SELECT /* ; /* ; */ ; */ 3",
        "/* a /* b; */ c */ SELECT E'\\';'",
        'SELECT 4 AS "a;""b"',
        "SELECT E'a' -- ;\n '\\';'",
        "SELECT a$$ FROM (SELECT 5 AS a$$) AS t",
    ],
}
SAID = {"sqlite": [";", 2, 3, ";;"], "postgresql": [";", " a;b $$ ", 3, "';", 4, "a';", 5]}


def test_a_semicolon_inside_a_statement_does_not_end_it(ask: Ask, url: str) -> None:
    dialect = parse_url(url).dialect
    script = ";\n".join(HIDDEN[dialect])
    for text in (script, f";{script};", f"{script}; -- the end;", f" ; /* ; */; {script};;"):
        code, out, err = ask("--url", url, "--json", typed=text)
        assert (code, err) == (0, "")
        found = [
            value
            for part in out.split("]\n")
            if part
            for (value,) in map(dict.values, json.loads(part + "]"))
        ]
        assert found == SAID[dialect]
    for nothing in ("", ";", " ; ;\n", "-- a comment", "/* ; */;"):
        assert ask("--url", url, typed=nothing) == (0, "", ""), nothing


def test_functions_decode_and_a_person_sees_arrays_shortened(ask: Ask, url: str) -> None:
    put(url, "call-1")
    query = (
        "SELECT audit_prompt_token_ids(run, rollout_id, model_call_id) AS ids FROM audit_calls"
        " WHERE rollout_id = 'hostile'"
    )
    _, out, _ = ask("--url", url, query)
    assert "[0, 1, 2, 3, 4, 5, 6, 7, … 2,500 in all]" in out
    _, out, _ = ask("--url", url, "--full", query)
    assert "2498, 2499]" in out
    (row,) = json.loads(ask("--url", url, "--json", query)[1])
    ids = json.loads(row["ids"]) if url.startswith("sqlite") else row["ids"]
    assert ids == list(range(2500))


def test_integrity_is_computed_on_sqlite_too(ask: Ask, url: str) -> None:
    query = "SELECT DISTINCT agrees FROM audit_integrity"
    assert [bool(row["agrees"]) for row in json.loads(ask("--url", url, "--json", query)[1])] == [True]


def test_text_of_the_database_does_not_steer_a_terminal(ask: Ask, url: str) -> None:
    put(url, HOSTILE)
    query = "SELECT model_call_id FROM audit_calls WHERE rollout_id = 'hostile'"
    for form in ([], ["--json"]):
        out = ask("--url", url, *form, query)[1]
        assert "[red]x[/red]" in out
        assert "\x1b" not in out


def test_a_corrupt_call_is_named_in_one_line(ask: Ask, url: str) -> None:
    put(url, "call-1")
    probes.run_script(url, f"UPDATE entries SET payload_sha256 = '{'0' * 64}' WHERE rollout_id = 'hostile'")
    code, out, err = ask(
        "--url", url, "SELECT audit_prompt_token_ids(run, rollout_id, 'call-1') FROM audit_rollouts WHERE run = "
        f"'{RUN}' AND rollout_id = 'hostile'"
    )  # fmt: skip
    assert (code, out) == (1, "")
    assert "call call-1 of rollout hostile" in err
    assert len(err.splitlines()) == 1


READONLY_SQLITE = [
    "DELETE FROM fences",
    "INSERT INTO wire_schema VALUES ('x', 1)",
    "UPDATE fences SET version = 9",
    "REPLACE INTO wire_schema VALUES ('x', 1)",
    "DROP VIEW audit_calls",
    "CREATE TABLE t (a)",
    "CREATE TEMP TABLE t (a)",
    "CREATE TEMP TRIGGER t AFTER INSERT ON fences BEGIN SELECT 1; END",
    "ATTACH 'new.db' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH temp",
    "VACUUM",
    "VACUUM INTO 'new.db'",
    "REINDEX",
    "ANALYZE",
    "BEGIN IMMEDIATE",
    "PRAGMA query_only = OFF",
    "PRAGMA query_only",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA writable_schema = ON",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA user_version = 7",
    "PRAGMA temp_store_directory = '.'",
    "SELECT load_extension('libm.so.6')",
    "SELECT * FROM pragma_wal_checkpoint",
    "WITH x AS (SELECT 1) DELETE FROM fences",
    "EXPLAIN DELETE FROM fences",
]
READONLY_POSTGRESQL = [
    "DELETE FROM fences",
    "INSERT INTO wire_schema VALUES ('x', 1)",
    "WITH gone AS (DELETE FROM fences RETURNING 1) SELECT * FROM gone",
    "EXPLAIN ANALYZE DELETE FROM fences",
    "SELECT 1 INTO new_table",
    "SET TRANSACTION READ WRITE",
    "SET default_transaction_read_only = off",
    "SELECT set_config('transaction_read_only', 'off', false)",
    "COMMIT",
    "ROLLBACK",
    "/* SELECT */ COMMIT",
    "\n-- SELECT\nDELETE FROM fences",
    # One comment to the server, which would run what follows it.
    "/* /* */ SELECT */ COPY (SELECT 1) TO '/nowhere/at-all'",
    "DO $$ BEGIN DELETE FROM fences; END $$",
    "COPY (SELECT 1) TO '/nowhere/at-all'",
    "COPY (SELECT 1) TO PROGRAM 'true'",
    "CALL nothing()",
    "SELECT * FROM fences FOR UPDATE",
    "SELECT nextval('a_sequence')",
    "CREATE TEMP TABLE t (a int)",
    "VACUUM",
    "LISTEN a",
    "TRUNCATE fences CASCADE",
]


@pytest.mark.parametrize("statement", READONLY_SQLITE)
def test_readonly_sqlite(
    ask: Ask, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    code, out, err = ask("--url", sqlite_url, statement)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_readonly_postgresql(ask: Ask, postgres_url: str) -> None:
    probes.rows(postgres_url, "CREATE SEQUENCE a_sequence")
    probes.rows(postgres_url, "INSERT INTO fences VALUES ('r', 'o', 'open', 0, NULL, false, now())")
    before = probes.objects(postgres_url)
    for statement in READONLY_POSTGRESQL:
        code, out, err = ask("--url", postgres_url, statement)
        assert (code, out) == (1, ""), statement
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        # Nor does what was set, or ended, help the next.
        code, _, err = ask("--url", postgres_url, f"{statement.rstrip(';')}; DELETE FROM fences")
        assert code == 1
    for helped in ("SET TRANSACTION READ WRITE", "COMMIT"):
        assert ask("--url", postgres_url, typed=f"{helped};\nDELETE FROM fences;")[0] == 1
    # Which a read-only transaction allows before PostgreSQL 16, so it must not be committed.
    ask("--url", postgres_url, "SELECT lo_create(0)")
    assert probes.rows(postgres_url, "SELECT count(*) FROM pg_largeobject_metadata") == [(0,)]
    assert probes.rows(postgres_url, "SELECT version FROM fences") == [(0,)]
    assert probes.objects(postgres_url) == before


def test_the_server_takes_one_statement_at_a_time(postgres_url: str) -> None:
    asked = PostgresqlQueries(parse_url(postgres_url))
    with pytest.raises(QueryError, match="multiple commands"):
        asked.run("SELECT 1; COMMIT; DELETE FROM fences", lambda *_: None)


def test_ctrl_c_that_comes_before_a_query_runs_cancels_it(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(functions.AuditFunctions):
        error = property(lambda _: None, lambda *_: signal.raise_signal(signal.SIGINT))  # type: ignore[assignment]

    asked = SqliteQueries(parse_url(sqlite_url))
    monkeypatch.setattr(asked, "_functions", object.__new__(Interrupted))
    answered: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        asked.run(
            f"{SLOW['sqlite'].rstrip(';')[: -len(' FROM n')]} FROM (SELECT * FROM n LIMIT 1000000)",
            lambda _, rows: answered.extend(rows),
        )
    asked.close()
    assert answered == []


def test_telling_pragmas_work(ask: Ask, sqlite_url: str) -> None:
    code, out, err = ask(
        "--url",
        sqlite_url,
        "--csv",
        "PRAGMA table_info(fences)",
    )
    assert (code, err) == (0, "")
    assert "rollout_id" in out


def test_wrong_use_and_missing_databases_are_one_line(
    ask: Ask, tmp_path: Path, empty_postgres_url: str
) -> None:
    assert ask("--url", "x.db", "--json", "--csv", "SELECT 1")[0] == 2
    for missing, said in ((str(tmp_path / "no.db"), "does not exist"), (empty_postgres_url, "db upgrade")):
        code, out, err = ask("--url", missing, "SELECT 1")
        assert (code, out) == (1, "")
        assert said in err
        assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    code, _, err = ask("--url", "postgresql://u:not-to-be-seen@127.0.0.1:1/captures", "SELECT 1")
    assert code == 1
    assert "not-to-be-seen" not in err


def test_two_columns_of_one_name_are_not_lost_in_json(ask: Ask, sqlite_url: str) -> None:
    code, out, err = ask("--url", sqlite_url, "--json", "SELECT 1 AS a, 2 AS a")
    assert (code, out) == (1, "")
    assert "AS" in err


class Terminal:
    """The command at a terminal of its own."""

    def __init__(self, url: str, home: Path) -> None:
        self._main, child = pty.openpty()
        environment = os.environ | {"TOKENCUSTODY_URL": url, "XDG_STATE_HOME": str(home), "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tokencustody", "sql"],
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment,
            start_new_session=True,
        )
        os.close(child)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, text: str) -> str:
        """Return what was shown up to `text` since the last wait."""
        while text not in self.shown:
            try:
                data = os.read(self._main, 65536)
            except OSError:
                data = b""
            assert data, f"{text!r} was not shown: {self.shown!r}"
            self.shown += data.decode(errors="replace")
        found, _, self.shown = self.shown.partition(text)
        return found

    def close(self) -> int:
        code = self.process.wait(60)
        os.close(self._main)
        return code


SLOW = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n;",
    "postgresql": "SELECT pg_sleep(600);",
}
IS_RUNNING = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%' AND state = 'active'"


def test_the_prompt_answers_remembers_and_survives_ctrl_c(url: str, tmp_path: Path) -> None:
    terminal = Terminal(url, tmp_path / "state")
    watchdog = threading.Timer(120, terminal.process.kill)
    watchdog.start()
    try:
        terminal.wait_for("tokencustody> ")
        terminal.type("SELECT count(*)\n")
        terminal.wait_for("...> ")
        terminal.type("AS n FROM audit_rollouts;\n")
        assert "8" in terminal.wait_for("1 row")
        terminal.type(".tables\n")
        assert "audit_rollouts" in terminal.wait_for("rows")
        terminal.type(".schema audit_exports\n")
        assert "manifest_sha256" in terminal.wait_for("rows")
        terminal.type("SELEC;\n")
        terminal.wait_for("error: ")
        terminal.wait_for("tokencustody> ")
        terminal.type(SLOW[parse_url(url).dialect] + "\n")
        terminal.wait_for("\r\n")
        if url.startswith("postgresql"):
            while probes.rows(url, IS_RUNNING) == [(0,)]:
                pass
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.wait_for("cancelled")
        terminal.wait_for("tokencustody> ")
        terminal.type("SELECT 41 + 1 AS answer;\n")
        assert "42" in terminal.wait_for("1 row")
        terminal.type(".quit\n")
        assert terminal.close() == 0
    finally:
        watchdog.cancel()
        terminal.process.kill()
    history = tmp_path / "state" / "tokencustody" / "sql_history"
    assert "SELECT 41 + 1 AS answer;" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    if url.startswith("postgresql"):
        assert probes.rows(url, IS_RUNNING) == [(0,)]


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_ctrl_c_ends_a_script_with_130(request: pytest.FixtureRequest, dialect: str) -> None:
    url: Any = request.getfixturevalue("sqlite_url" if dialect == "sqlite" else "postgres_url")
    migrate.upgrade(url)
    first = "SELECT 'running' AS state;"
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tokencustody", "sql", "--url", url, "--csv", first + SLOW[dialect]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["state\n", "running\n"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
