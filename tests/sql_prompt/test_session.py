"""The prompt and the scripts of `tokencustody sql`: what people type out of habit does what they expect."""

from __future__ import annotations

import fcntl
import json
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.sql_prompt.test_command import Ask, Terminal, ask, url  # noqa: F401 - fixtures
from tests.support import probes
from tests.support.audited import RUN
from tokencustody.database.url import parse_url
from tokencustody.sql_prompt.output import show_json
from tokencustody.sql_prompt.queries import open_queries
from tokencustody.sql_prompt.session import Session


@contextmanager
def at_prompt(url: str, home: Path, *, columns: int = 200) -> Iterator[Terminal]:  # noqa: F811
    terminal = Terminal(url, home)
    fcntl.ioctl(terminal._main, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    watchdog = threading.Timer(300, terminal.process.kill)  # against hanging
    watchdog.start()
    try:
        terminal.wait_for("tokencustody> ")
        yield terminal
    finally:
        watchdog.cancel()
        terminal.process.kill()
        terminal.process.wait()


def test_commands_of_habit_answer_and_leave(ask: Ask, url: str) -> None:  # noqa: F811
    for listing in ("\\d", ".tables", "\\dv", "\\d;"):
        code, out, err = ask("--url", url, typed=f"{listing}\n")
        assert (code, err) == (0, "")
        assert "audit_rollouts" in out
        assert ("fences" in out) == (listing != "\\dv")
    for columns in ("\\d fences", ".schema fences", '\\d "fences"', "\\d+ fences;"):
        assert "rollout_id" in ask("--url", url, typed=columns)[1]
    for helping in ("help", "HELP;", "\\?", ".help", "?"):
        assert "\\timing" in ask("--url", url, typed=helping)[1]
    for leaving in ("quit", "exit;", "\\q", ".quit", "EXIT"):
        assert ask("--url", url, "--csv", typed=f"{leaving}\nSELECT 1 AS one;") == (0, "", "")
    # Inside a statement they are what they are there.
    assert ask("--url", url, "--csv", typed="SELECT 1 AS\nquit\n;") == (0, "quit\n1\n", "")


@pytest.mark.parametrize("ahead", ["-- what is there?", "SELECT 1; -- one", "SELECT 1;", "/* so\nmuch */"])
def test_a_command_is_one_behind_comments_and_statements_too(ask: Ask, url: str, ahead: str) -> None:  # noqa: F811
    for between in ("\n", " ") if ahead.endswith(";") else ("\n",):
        code, out, err = ask("--url", url, typed=f"{ahead}{between}.tables\n\\x on\nSELECT 2 AS two;")
        assert (code, err) == (0, "")
        assert "audit_rollouts" in out
        assert "two | 2" in out


def test_a_command_within_a_statement_is_named(ask: Ask, url: str) -> None:  # noqa: F811
    code, out, err = ask("--url", url, typed="SELECT 1\n.tables\n")
    assert (code, out) == (1, "")
    assert err.endswith("; before .tables the statement must end with a semicolon\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("wrong", ["\\foo", ".mode csv", "\\d nowhere", "\\x sideways", "\\timing maybe"])
def test_a_command_that_is_not_there_is_an_error_in_one_line(ask: Ask, sqlite_url: str, wrong: str) -> None:  # noqa: F811
    code, out, err = ask("--url", sqlite_url, typed=f"{wrong}\nSELECT 1;")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_timing_tells_how_long_each_statement_took(ask: Ask, url: str) -> None:  # noqa: F811
    _, out, _ = ask("--url", url, "--csv", typed="\\timing\nSELECT 1 AS one;\n\\timing off\nSELECT 2 AS two;")
    assert [line for line in out.splitlines() if line.endswith(" ms")] == out.splitlines()[3:4]


def test_rows_become_lines_where_a_person_says_so(ask: Ask, url: str) -> None:  # noqa: F811
    lines = "-[ 1 ]-\none | 1\n1 row\n"
    assert ask("--url", url, "-x", "SELECT 1 AS one")[1] == lines
    _, out, _ = ask("--url", url, typed="\\x on\nSELECT 1 AS one;\n\\x off\nSELECT 1 AS one;")
    assert lines in out
    assert "one" in out.split(lines)[1]
    assert "-[" not in out.split(lines)[1]
    # In a pipe nothing is too wide.
    assert "-[" not in ask("--url", url, "SELECT * FROM audit_calls")[1]


def test_a_file_stops_at_the_first_fault_and_says_where(ask: Ask, url: str, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "script.sql"
    script.write_text("\ufeffSELECT 1 AS a;\n\nSELECT *\nFROM nowhere;\nSELECT 3 AS b;\n")
    code, out, err = ask("--url", url, "--csv", "-f", str(script))
    assert (code, out) == (1, "a\n1\n")
    assert err.startswith(f"error: {script}, the statement that begins in line 3: ")
    assert ask("--url", url, "--csv", "-f", "-", typed="SELECT 1 AS a") == (0, "a\n1\n", "")
    for wrong in (["-f", str(tmp_path / "no.sql")], ["-f", str(tmp_path)], ["-f", "-", "SELECT 1"]):
        assert ask("--url", url, *wrong)[0] == 2


def test_both_databases_show_the_same_values_the_same_way(ask: Ask, url: str) -> None:  # noqa: F811
    query = (
        "SELECT incomplete, version, opened_at, frozen_at FROM audit_rollouts"
        f" WHERE run = '{RUN}' AND rollout_id = 'clean'"
    )
    (row,) = json.loads(ask("--url", url, "--json", query)[1])
    assert [type(row[name]) for name in ("incomplete", "version")] == [int, int]
    stored = probes.rows(url, f"SELECT opened_at FROM fences WHERE run = '{RUN}' AND rollout_id = 'clean'")[
        0
    ][0]
    shown = stored if isinstance(stored, str) else stored.strftime("%Y-%m-%d %H:%M:%S.%f")
    assert row["opened_at"] == shown
    is_sqlite = url.startswith("sqlite")
    values = (
        "0.1 AS tenth, 1e300 AS huge, 2.0 AS two, NULL AS none, 18446744073709551615 AS most, x'00ff' AS bytes"
        if is_sqlite
        else "0.1::float8 AS tenth, 1e300::float8 AS huge, 2.0 AS two, NULL AS none,"
        " 9223372036854775807 + 9223372036854775808 AS most, '\\x00ff'::bytea AS bytes"
    )
    (row,) = json.loads(ask("--url", url, "--json", f"SELECT {values}")[1])
    most = 2.0**64 if is_sqlite else 2**64 - 1
    assert row == {"tenth": 0.1, "huge": 1e300, "two": 2.0, "none": None, "most": most, "bytes": "00ff"}
    (row,) = json.loads(
        ask("--url", url, "--json", "SELECT sum(n) AS s, avg(n) AS a FROM (SELECT 1 AS n) AS t")[1]
    )
    assert repr(row) == "{'s': 1, 'a': 1.0}"


def test_a_wide_row_turns_vertical_at_a_narrow_terminal(url: str, tmp_path: Path) -> None:  # noqa: F811
    with at_prompt(url, tmp_path, columns=60) as terminal:
        terminal.type("SELECT * FROM audit_rollouts WHERE rollout_id = 'clean';\n")
        shown = terminal.wait_for("1 row")
        assert "-[ 1 ]-" in shown
        terminal.type("\\x off\nSELECT 1 AS narrow;\n\\x auto\nSELECT 2 AS narrow;\n")
        terminal.wait_for("rows as lines: auto")
        assert "-[" not in terminal.wait_for("1 row")
        terminal.type("nonsense;\n")
        terminal.wait_for("error: ")
        terminal.type("exit\n")
        assert terminal.close() == 0


def test_names_and_words_complete(url: str) -> None:  # noqa: F811
    queries = open_queries(parse_url(url))
    session = Session(queries, show_json)
    assert session.completions("audit_roll") == ["audit_rollouts"]
    assert "rollout_id" in session.completions("rollo")
    assert "audit_prompt_token_ids" in session.completions("audit_p")
    assert session.completions("SEL") == ["SELECT"]
    assert "select" in session.completions("sel")
    assert session.completions("\\t") == ["\\timing"]
    queries.close()


def test_tab_completes_at_the_prompt(url: str, tmp_path: Path) -> None:  # noqa: F811
    with at_prompt(url, tmp_path) as terminal:
        terminal.type("SELECT count(*) AS n FROM audit_roll\t;\n")
        assert "audit_rollouts" in terminal.wait_for("1 row")
        terminal.type("quit\n")
        assert terminal.close() == 0


def test_a_superuser_is_warned_and_an_auditor_is_not(postgres_url: str) -> None:
    warned = open_queries(parse_url(postgres_url))
    assert "is a superuser" in str(warned.warning())
    name = "asking_" + postgres_url.rpartition("_")[2]
    probes.rows(postgres_url, f"CREATE ROLE {name} LOGIN PASSWORD 'x'")
    probes.rows(postgres_url, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {name}")
    try:
        scheme, _, rest = postgres_url.partition("://")
        plain = f"{scheme}://{name}:x@{rest.rpartition('@')[2]}"
        assert open_queries(parse_url(plain)).warning() is None
        for role, said in (
            ("pg_write_server_files", "write files"),
            ("pg_read_server_files", "read files"),
            ("pg_execute_server_program", "run programs"),
            ("pg_signal_backend", "end sessions"),
        ):
            probes.rows(postgres_url, f"GRANT {role} TO {name}")
            assert said in str(open_queries(parse_url(plain)).warning())
            probes.rows(postgres_url, f"REVOKE {role} FROM {name}")
        probes.rows(
            postgres_url, "CREATE FUNCTION helper() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'"
        )
        assert "rights of others" in str(open_queries(parse_url(plain)).warning())
    finally:
        probes.rows(postgres_url, f"DROP OWNED BY {name}")
        probes.rows(postgres_url, f"DROP ROLE {name}")


def test_the_prompt_tells_the_warning_before_anything_is_asked(postgres_url: str, tmp_path: Path) -> None:
    terminal = Terminal(postgres_url, tmp_path)
    try:
        assert "warning: this user is a superuser" in terminal.wait_for("tokencustody> ")
        terminal.type("\\q\n")
        assert terminal.close() == 0
    finally:
        terminal.process.kill()


@pytest.mark.parametrize("function", ["json_each", "json_tree"])
def test_json_is_taken_apart_on_sqlite(ask: Ask, sqlite_url: str, function: str) -> None:  # noqa: F811
    query = f"SELECT sum(atom) AS s FROM {function}('[1, 2]')"
    assert ask("--url", sqlite_url, "--json", query) == (0, '[\n  {"s": 3}\n]\n', "")


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT fts3_tokenizer('simple')",
        "SELECT hex(FTS3_tokenizer('simple', x'00'))",
        "SELECT * FROM fts3tokenize",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "CREATE TEMP TABLE t AS SELECT 1",
        "SELECT readfile('/etc/hostname')",
        "SELECT writefile('new', 'x')",
        "SELECT * FROM pragma_journal_mode",
        "PRAGMA function_list = 1; PRAGMA mmap_size = 1",
        "SELECT * FROM json_each('[1]'); ATTACH 'new.db' AS other",
    ],
)
def test_what_reaches_beyond_the_rows_is_denied_on_sqlite(
    ask: Ask,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = ask("--url", sqlite_url, statement)
    assert (code, err.startswith("error: ")) == (1, True)
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.db").exists()
