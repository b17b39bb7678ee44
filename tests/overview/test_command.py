"""`tokencustody rollouts` and `tokencustody show`, on both databases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, select, update

from tests.support.entries import make_entry
from tests.support.ledger import make_commit
from tests.support.rollouts import linear_rollout
from tokencustody import open_store
from tokencustody.cli import main
from tokencustody.database.url import parse_url
from tokencustody.errors import PayloadConflictError
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.schema.tables import fences, metadata
from tokencustody.store import CaptureStore

Cli = Callable[..., str]
Shell = Callable[..., tuple[object, str, str]]
HOSTILE = "[red]x[/red] :smile:\n\x1b[31m\u202e\u009b2J"
SHOWN = r"[red]x[/red] :smile:\n\x1b[31m\u202e\x9b2J"
ROLLOUT_KEYS = [
    "run",
    "rollout_id",
    "state",
    "version",
    "snapshot_id",
    "incomplete",
    "reasons",
    "not_yet_captured",
    "calls",
    "prompt_tokens",
    "generated_tokens",
    "parents_not_recorded",
    "ledger_calls",
    "ledger_failures",
    "opened_at",
    "frozen_at",
    "retired_at",
    "retired_by",
]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store_url: str) -> Shell:
    """Run a command on the database as from a shell; returns its exit code, output and error output."""
    monkeypatch.setenv("TOKENCUSTODY_URL", store_url)

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tokencustody", *arguments])
        with pytest.raises(SystemExit) as exited:
            main()
        return exited.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def cli(shell: Shell) -> Cli:
    """Run a command that must succeed and say nothing on stderr; returns its output."""

    def run(*arguments: str) -> str:
        code, out, err = shell(*arguments)
        assert (code, err) == (0, "")
        return out

    return run


def fill(url: str, *steps: Callable[[CaptureStore], Awaitable[Any]], run: str = "run-1") -> None:
    async def take() -> None:
        async with open_store(url, run=run, writer="writer-1") as store:
            for step in steps:
                await step(store)

    asyncio.run(take())


async def every_kind(store: CaptureStore) -> None:
    """Write one rollout of each kind that a person may meet."""
    sink, source = store.sink, store.source
    await sink.begin_call("open", "call-1")
    await sink.put(make_entry("open", "call-1"))
    await sink.begin_call("open", "call-2")
    await sink.put(make_entry("clean", "call-1"))
    await source.freeze("clean")
    await sink.put(make_entry("bad", "call-1", model="m"))
    with contextlib.suppress(PayloadConflictError):
        await sink.put(make_entry("bad", "call-1", model="n"))
    await sink.refuse_call("bad", model_call_id="call-5", code="too_long")
    with contextlib.suppress(PayloadConflictError):
        await sink.refuse_call("bad", model_call_id="call-5", code="other")
    for call_id in ("call-3", "", "call-3"):
        await sink.mark_incomplete("bad", call_id)
    await sink.begin_call("bad", "call-9")
    await source.freeze("bad")
    await sink.put(make_entry("consumed", "call-1"))
    snapshot = await source.freeze("consumed")
    assert await source.drop("consumed", snapshot.snapshot_id, snapshot.version)
    await sink.mark_incomplete("abandoned", "call-1")
    await source.retire(["abandoned"])
    await sink.begin_call("dangled", "call-1")
    snapshot = await source.freeze("dangled")
    assert await source.drop("dangled", snapshot.snapshot_id, snapshot.version)


FILLED = pytest.mark.filled(by=lambda url: fill(url, every_kind))


async def ledger_only(store: CaptureStore) -> None:
    """Record two turns, a failure, and a call whose answer had no response id."""
    first = make_commit("staged", "call-z", weight_version=3)
    await store.lineage.record(first)
    await store.lineage.record_failure("staged", "call-lost", "worker_capture_failed")
    await store.lineage.record(make_commit("staged", "call-a", parent=first, weight_version=4))
    await store.lineage.record(make_commit("elsewhere", "call-m"))
    rows = await store.lineage.export_rows("elsewhere")
    rows[0]["record"]["response_id"] = None
    await store.lineage.import_rows("staged", rows)
    await store.lineage.delete(["elsewhere"])


def listed(out: str) -> dict[str, dict[str, Any]]:
    return {rollout["rollout_id"]: rollout for rollout in json.loads(out)}


def reason(kind: str, call_id: str, differing: str = "", times: int = 1) -> dict[str, Any]:
    return {"kind": kind, "model_call_id": call_id, "differing_fields": differing, "times": times}


def everything(url: str) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table."""

    def read(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
        return {
            name: sorted(map(tuple, connection.execute(select(table))), key=repr)
            for name, table in metadata.tables.items()
        }

    async def run() -> dict[str, list[tuple[Any, ...]]]:
        database = CaptureDatabase(parse_url(url))
        try:
            return await database.read(read)
        finally:
            await database.close()

    return asyncio.run(run())


@contextlib.contextmanager
def recorded_statements() -> Iterator[list[str]]:
    statements: list[str] = []

    def record(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", record)


class TestRollouts:
    @FILLED
    def test_json_tells_state_counts_and_version_of_each_rollout(self, cli: Cli) -> None:
        found = listed(cli("rollouts", "--json"))
        told = ("state", "version", "incomplete", "calls", "prompt_tokens", "generated_tokens", "retired_by")
        assert {name: tuple(rollout[key] for key in told) for name, rollout in found.items()} == {
            "open": ("open", 0, False, 1, 4, 3, None),
            "clean": ("frozen", 1, False, 1, 4, 3, None),
            "bad": ("frozen", 6, True, 1, 4, 3, None),
            "consumed": ("retired", 2, False, 0, 0, 0, "drop"),
            "abandoned": ("retired", 2, True, 0, 0, 0, "retire"),
            "dangled": ("retired", 2, True, 0, 0, 0, "drop"),
        }

    @FILLED
    def test_json_tells_every_reason_why_a_rollout_is_incomplete(self, cli: Cli) -> None:
        found = listed(cli("rollouts", "--json"))
        assert {name: rollout["reasons"] for name, rollout in found.items() if rollout["reasons"]} == {
            "bad": [
                reason("conflict", "call-1", "model"),
                reason("mark", "call-3", times=2),
                reason("mark", ""),
                reason("dangling_intent", "call-9"),
            ],
            "abandoned": [reason("mark", "call-1")],
            "dangled": [reason("dangling_intent", "")],
        }

    @FILLED
    def test_an_intent_dangles_only_once_its_rollout_is_frozen(self, cli: Cli, store_url: str) -> None:
        rollout = listed(cli("rollouts", "--json"))["open"]
        assert (rollout["reasons"], rollout["not_yet_captured"]) == ([], ["call-2"])
        fill(store_url, lambda store: store.source.freeze("open"))
        rollout = listed(cli("rollouts", "--json"))["open"]
        assert (rollout["reasons"], rollout["not_yet_captured"]) == (
            [reason("dangling_intent", "call-2")],
            [],
        )

    @FILLED
    def test_json_objects_have_the_same_keys_in_the_same_order(self, cli: Cli) -> None:
        assert {tuple(rollout) for rollout in json.loads(cli("rollouts", "--json"))} == {tuple(ROLLOUT_KEYS)}

    @FILLED
    def test_the_table_says_why_in_words(self, cli: Cli) -> None:
        rows = {line.split()[1]: line for line in cli("rollouts").splitlines()[1:-1]}
        assert (
            "yes: 3 marks: call-3 2 times, (unnamed); conflict on call-1 (differing: model); "
            "1 dangling intent: call-9"
        ) in rows["bad"]
        assert "no: 1 call not yet captured: call-2" in rows["open"]
        assert "yes: 1 mark: call-1" in rows["abandoned"]
        assert "yes: dangling intents, removed with the records" in rows["dangled"]
        assert "Z by drop" in rows["consumed"]
        assert "Z by retire" in rows["abandoned"]
        assert rows["clean"].rstrip().endswith(" no")

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            (["--state", "open"], {"open"}),
            (["--state", "frozen"], {"clean", "bad"}),
            (["--state", "retired"], {"consumed", "abandoned", "dangled"}),
            (["--incomplete"], {"bad", "abandoned", "dangled"}),
            (["--complete", "--state", "frozen"], {"clean"}),
            (["--prefix", "c"], {"clean", "consumed"}),
            (["--prefix", "C"], set()),
            (["--prefix", "_"], set()),
            (["--run", "run-1", "--prefix", "open"], {"open"}),
            (["--run", "run-2"], set()),
        ],
    )
    @FILLED
    def test_each_filter_keeps_what_it_names(self, cli: Cli, options: list[str], names: set[str]) -> None:
        assert set(listed(cli("rollouts", "--json", *options))) == names

    def test_without_a_run_the_rollouts_of_every_run_are_listed(self, cli: Cli, store_url: str) -> None:
        for run in ("run-1", "run-2"):
            fill(store_url, lambda store: store.sink.put(make_entry("same")), run=run)
        assert [rollout["run"] for rollout in json.loads(cli("rollouts", "--json"))] == ["run-2", "run-1"]

    @FILLED
    def test_the_newest_come_first_and_the_footer_counts_all(self, cli: Cli) -> None:
        *_, second, footer = cli("rollouts", "--limit", "2").splitlines()
        assert second.split()[1] == "abandoned"
        assert footer == (
            "6 rollouts (1 open, 2 frozen, 3 retired; 3 incomplete), 3 calls, "
            "12 prompt + 9 generated tokens; the newest 2 are shown, see --limit"
        )
        newest = json.loads(cli("rollouts", "--limit", "2", "--json"))
        assert [rollout["rollout_id"] for rollout in newest] == ["dangled", "abandoned"]

    def test_what_the_ledger_recorded_is_counted_beside_the_complete_records(
        self, cli: Cli, store_url: str
    ) -> None:
        fill(store_url, ledger_only, lambda store: store.sink.put(make_entry("captured")))
        found = listed(cli("rollouts", "--json"))
        told = ("calls", "ledger_calls", "ledger_failures")
        assert {name: tuple(rollout[key] for key in told) for name, rollout in found.items()} == {
            "staged": (0, 3, 1),
            "captured": (1, 0, 0),
        }
        header, *rows, footer = cli("rollouts").splitlines()
        cells = {line.split()[1]: re.split(r" {2,}", line) for line in rows}
        column = re.split(r" {2,}", header).index("ledger")
        assert (cells["staged"][column], cells["captured"][column]) == ("3 + 1 failed", "0")
        assert footer.endswith("generated tokens; in the ledger 3 calls and 1 failure")

    def test_an_empty_database_has_no_rollouts_and_that_is_no_error(self, cli: Cli, store_url: str) -> None:
        fill(store_url, lambda store: store.source.delete(["none"]))
        assert json.loads(cli("rollouts", "--json")) == []
        assert cli("rollouts") == "no rollout matches\n"

    def test_many_rollouts_take_as_many_statements_as_one_and_no_payload(
        self, cli: Cli, store_url: str
    ) -> None:
        fill(store_url, lambda store: store.sink.put(make_entry("first")))
        with recorded_statements() as for_one:
            cli("rollouts")
        fill(store_url, every_kind)
        fill(store_url, ledger_only)
        with recorded_statements() as for_many:
            cli("rollouts")
        assert len(for_many) == len(for_one) > 3
        assert not re.search(r"payload(?!_sha256)", " ".join(for_many))

    def test_an_id_too_long_to_fit_is_whole_in_a_terminal_too(
        self, cli: Cli, store_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rollout_id = "".join(chr(ord("A") + n % 26) for n in range(255))
        fill(store_url, lambda store: store.sink.put(make_entry(rollout_id)))
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
        lines = re.sub(r"\x1b\[[0-9;]*m", "", cli("rollouts")).splitlines()
        assert max(map(len, lines)) <= 80
        assert rollout_id in "".join(re.findall(r"[A-Z]{3,}", "\n".join(lines)))

    def test_a_terminal_has_a_column_for_the_ledger_only_where_something_is_in_it(
        self, cli: Cli, store_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "80")
        fill(store_url, lambda store: store.sink.put(make_entry("captured")))
        assert "ledger" not in cli("rollouts")
        fill(store_url, ledger_only)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", cli("rollouts")).splitlines()
        assert max(map(len, lines)) <= 80
        assert re.search(r"staged +open +0 +0 \+ 0 +3 \+ 1 +0 ", lines[1])


class TestShow:
    def test_calls_stand_in_a_tree_by_parent_in_commit_order(self, cli: Cli, store_url: str) -> None:
        entries = [
            make_entry("r", "a"),
            make_entry("r", "z", parent="a"),
            make_entry("r", "b", parent="z"),
            make_entry("r", "y", parent="b"),
            make_entry("r", "c", parent="b"),
            make_entry("r", "second"),
        ]
        fill(store_url, *(lambda store, entry=entry: store.sink.put(entry) for entry in entries))
        lines = [line.split(" · ")[0] for line in cli("show", "r").splitlines() if "committed" in line]
        assert lines == [
            "├── a",
            "│   ↳ z",
            "│   ↳ b",
            "│   ├── y",
            "│   └── c",
            "└── second",
        ]

    def test_each_call_is_told_with_its_lengths_parent_and_writer(self, cli: Cli, store_url: str) -> None:
        entry = make_entry("r", "call-1", model="smol", response_id="resp-1")
        unresolved = make_entry("r", "call-2").model_copy(
            update={"parent_resolution": "unresolved", "parent_resolution_reason": "no_match"}
        )
        undecided = make_entry("r", "call-3").model_copy(update={"parent_resolution": None})
        fill(store_url, *(lambda store, e=e: store.sink.put(e) for e in (entry, unresolved, undecided)))
        lines = [line for line in cli("show", "r").splitlines() if "committed" in line]
        assert re.search(
            r"call-1 · root · 4 prompt \+ 3 generated, cum_len 7 · model smol · response resp-1"
            r" · committed \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z by writer-1$",
            lines[0],
        )
        assert "call-2 · unresolved: no_match · " in lines[1]
        assert "call-3 · parent not decided · " in lines[2]

    def test_calls_without_a_recorded_parent_are_counted_and_spoken_of(
        self, cli: Cli, store_url: str
    ) -> None:
        undecided = [
            make_entry("r", f"call-{number}").model_copy(update={"parent_resolution": None})
            for number in range(2)
        ]
        entries = [*undecided, make_entry("r", "stamped"), make_entry("sound")]
        fill(store_url, *(lambda store, e=e: store.sink.put(e) for e in entries))
        assert "3 calls (2 without a recorded parent), " in cli("show", "r")
        out = cli("rollouts")
        assert "4 calls (2 without a recorded parent), " in out
        assert out.count("2 calls without a recorded parent") == 1
        found = listed(cli("rollouts", "--json"))
        assert {name: each["parents_not_recorded"] for name, each in found.items()} == {"r": 2, "sound": 0}
        assert json.loads(cli("show", "r", "--json"))["summary"]["parents_not_recorded"] == 2
        verified = cli("verify")
        assert re.search(r"without a recorded parent +2 *", verified)
        assert json.loads(cli("verify", "--json"))["parents_not_recorded"] == 2

    @FILLED
    def test_the_header_the_intents_and_the_history_tell_the_whole_story(self, cli: Cli) -> None:
        out = cli("show", "bad")
        assert re.search(r"^state +frozen *$", out, re.MULTILINE)
        assert "incomplete  yes: 3 marks: call-3 2 times, (unnamed); conflict on call-1" in out
        assert re.search(r"call-1 · root · .* · conflict \(differing: model\)", out)
        assert re.search(r"refused by the engine\n│   └── call-5 · .* · refused: too_long at", out)
        assert re.search(r"announced, neither stored nor refused\n    └── call-9 · announced ", out)
        history = [line.split() for line in out.splitlines()[-7:]]
        assert [line[0] for line in history] == list("0123456")
        assert [line[1] for line in history] == [
            "open",
            "conflict",
            "refusal",
            "mark",
            "mark",
            "mark",
            "freeze",
        ]

    @FILLED
    def test_an_announced_call_of_an_open_rollout_is_not_yet_captured(self, cli: Cli) -> None:
        out = cli("show", "open")
        assert re.search(r"announced, not yet captured\n    └── call-2 · announced ", out)
        assert re.search(r"call-1 · root · .* · announced$", out, re.MULTILINE)

    @FILLED
    def test_a_retired_rollout_shows_its_history_and_that_its_calls_are_gone(self, cli: Cli) -> None:
        out = cli("show", "consumed")
        assert "no calls: retirement removed them" in out
        assert [line.split()[1] for line in out.splitlines()[-3:]] == ["open", "freeze", "drop"]

    def test_calls_without_their_parent_and_calls_in_a_circle_are_labelled_not_lost(
        self, cli: Cli, store_url: str
    ) -> None:
        entries = [
            make_entry("r", "root"),
            make_entry("r", "orphan", parent="gone"),
            make_entry("r", "orphan-child", parent="orphan"),
            make_entry("r", "x", parent="y"),
            make_entry("r", "y", parent="x"),
            make_entry("r", "below", parent="y"),
            make_entry("r", "self", parent="self"),
        ]
        fill(store_url, *(lambda store, entry=entry: store.sink.put(entry) for entry in entries))
        out = cli("show", "r")
        tree = [line.split(" · ")[0] for line in out.splitlines() if line.startswith(("├", "│", "└", " "))]
        assert tree[:9] == [
            "├── root",
            "├── the parent is not in this rollout: gone",
            "│   └── orphan",
            "│       ↳ orphan-child",
            "├── the parents go in a circle; this one names y",
            "│   └── x",
            "│       ↳ y",
            "│       ↳ below",
            "└── the parents go in a circle; this one names self",
        ]
        assert tree[9] == "    └── self"

    def test_a_rollout_of_many_turns_shows_each_call_on_a_line_of_its_own(
        self, cli: Cli, store_url: str
    ) -> None:
        # Enough that one step of indentation for each would not fit.
        turns = linear_rollout(60, rollout_id="deep")

        async def put_all(store: CaptureStore) -> None:
            await asyncio.gather(*(store.sink.put(turn.entry) for turn in turns))

        fill(store_url, put_all)
        lines = [line for line in cli("show", "deep").splitlines() if "committed" in line]
        assert [re.search(r"call-\d+", line)[0] for line in lines] == [f"call-{n}" for n in range(60)]  # type: ignore[index]
        assert max(map(len, lines)) < 160

    @FILLED
    def test_json_tells_calls_intents_and_versions_as_rows(self, cli: Cli) -> None:
        shown = json.loads(cli("show", "bad", "--json"))
        assert list(shown) == [
            "summary",
            "calls",
            "intents",
            "versions",
            "ledger_calls",
            "ledger_failures",
        ]
        assert list(shown["summary"]) == ROLLOUT_KEYS
        assert [(call["model_call_id"], call["cum_len"]) for call in shown["calls"]] == [("call-1", 7)]
        assert [(i["model_call_id"], i["stored"], i["refusal_code"]) for i in shown["intents"]] == [
            ("call-5", False, "too_long"),
            ("call-9", False, None),
        ]
        conflict = shown["versions"][1]
        assert (conflict["failure_kind"], conflict["differing_fields"]) == ("conflict", "model")
        assert len(conflict["first_payload_sha256"]) == len(conflict["second_payload_sha256"]) == 64

    def test_what_the_ledger_recorded_stands_in_commit_order_with_its_failures(
        self, cli: Cli, store_url: str
    ) -> None:
        fill(store_url, ledger_only)
        out = cli("show", "staged")
        assert "no complete records" in out
        lines = [line.split() for line in out.splitlines() if "/call-" in line]
        assert [line[0] for line in lines] == ["call-z", "call-a", "call-m"]
        assert lines[0][1:6] == ["text", "0", "3", "3", "staged/call-z"]
        assert lines[1][1:7] == ["call-z", "token_in", "3", "6", "4", "staged/call-a"]
        assert lines[2][5] == "elsewhere/call-m"
        assert [line[-2:] == ["response", "id"] for line in lines] == [False, False, True]
        assert re.search(r"call-lost +worker_capture_failed +\d{4}-.* writer-1", out)

        shown = json.loads(cli("show", "staged", "--json"))
        calls = [(call["position"], call["model_call_id"]) for call in shown["ledger_calls"]]
        assert calls == [(1, "call-z"), (3, "call-a"), (4, "call-m")]
        assert shown["ledger_calls"][1]["staging_key"] == "staged/call-a"
        failures = [(f["position"], f["model_call_id"], f["reason"]) for f in shown["ledger_failures"]]
        assert failures == [(2, "call-lost", "worker_capture_failed")]

    def test_no_token_log_probability_or_message_is_printed(self, cli: Cli, store_url: str) -> None:
        entry = make_entry(
            "r", prompt=[87654321], generation=[12345678], log_probs=[-0.73125], text="confidential"
        )
        fill(store_url, lambda store: store.sink.put(entry))
        printed = cli("show", "r") + cli("show", "r", "--json") + cli("rollouts") + cli("rollouts", "--json")
        assert not re.search("87654321|12345678|0.73125|confidential", printed)

    def test_the_run_must_be_named_only_when_several_have_the_id(
        self, cli: Cli, shell: Shell, store_url: str
    ) -> None:
        for run in ("run-1", "run-2"):
            fill(store_url, lambda store: store.sink.put(make_entry("same")), run=run)
        fill(store_url, lambda store: store.sink.put(make_entry("single")), run="run-2")
        assert cli("show", "single").startswith("rollout single of run run-2\n")
        assert cli("show", "same", "--run", "run-1").startswith("rollout same of run run-1\n")
        assert shell("show", "same") == (
            1,
            "",
            "error: rollout same is in 2 runs; name one of run-1, run-2\n",
        )

    @pytest.mark.parametrize("options", [[], ["--run", "run-2"], ["--json"]])
    def test_an_unknown_rollout_is_an_error(self, shell: Shell, store_url: str, options: list[str]) -> None:
        fill(store_url, lambda store: store.sink.put(make_entry("known")))
        where = "run run-2 of " if "--run" in options else ""
        message = f"error: rollout unknown is not in {where}{parse_url(store_url).display}\n"
        assert shell("show", "unknown", *options) == (1, "", message)


class TestBoth:
    @FILLED
    def test_neither_command_changes_anything(self, cli: Cli, store_url: str) -> None:
        rows, bytes_before = everything(store_url), _file_bytes(store_url)
        for arguments in (["rollouts"], ["rollouts", "--json"], ["show", "bad"], ["show", "bad", "--json"]):
            cli(*arguments)
        assert _file_bytes(store_url) == bytes_before
        assert everything(store_url) == rows

    @FILLED
    def test_both_commands_read_while_a_writer_holds_its_locks(self, cli: Cli, store_url: str) -> None:
        printed: list[str] = []

        def write(connection: Connection) -> None:
            connection.execute(update(fences).values(version=99))
            # In another thread: on PostgreSQL this one runs an event loop.
            with ThreadPoolExecutor(1) as other:
                for arguments in (["rollouts", "--json"], ["show", "bad", "--json"]):
                    printed.append(other.submit(cli, *arguments).result())

        async def run() -> None:
            database = CaptureDatabase(parse_url(store_url))
            try:
                await database.write(write)
            finally:
                await database.close()

        asyncio.run(run())
        assert listed(printed[0])["bad"]["version"] == json.loads(printed[1])["summary"]["version"] == 6
        assert listed(cli("rollouts", "--json"))["bad"]["version"] == 99

    def test_text_of_the_database_is_shown_and_never_obeyed(self, cli: Cli, store_url: str) -> None:
        async def hostile(store: CaptureStore) -> None:
            await store.sink.put(make_entry("r", HOSTILE, model=HOSTILE, response_id=HOSTILE))
            await store.sink.put(make_entry("r", "child", parent=HOSTILE))
            await store.sink.put(make_entry("r", "orphan", parent=HOSTILE + "gone"))
            await store.sink.refuse_call("r", model_call_id=HOSTILE + "refused", code=HOSTILE)
            await store.sink.mark_incomplete("r", HOSTILE)
            await store.sink.begin_call("r", HOSTILE + "dangling")
            await store.lineage.record(make_commit("r", HOSTILE, response_id=HOSTILE))
            await store.lineage.record_failure("r", HOSTILE + "failed", HOSTILE)

        fill(store_url, hostile)
        listing, shown = cli("rollouts"), cli("show", "r")
        assert f"1 mark: {SHOWN}; 1 call not yet captured: {SHOWN}dangling" in listing
        assert f"── {SHOWN} · root" in shown
        assert f"model {SHOWN} · response {SHOWN} · " in shown
        assert f"not in this rollout: {SHOWN}gone" in shown
        assert f"refused: {SHOWN} at " in shown
        as_json = cli("rollouts", "--json") + cli("show", "r", "--json")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", listing + shown + as_json)
        assert json.loads(cli("show", "r", "--json"))["calls"][0]["model_call_id"] == HOSTILE

    def test_a_pipe_gets_whole_lines_without_colour(self, store_url: str) -> None:
        rollout_id, call_id = "r" * 255, "c" * 512
        fill(store_url, lambda store: store.sink.put(make_entry(rollout_id, call_id)))
        for arguments, wanted in ((["rollouts"], rollout_id), (["show", rollout_id], call_id)):
            done = subprocess.run(
                [sys.executable, "-m", "tokencustody", *arguments, "--url", store_url],
                capture_output=True,
                check=True,
                env={**_plain_environment(), "COLUMNS": "80", "PYTHONIOENCODING": "ascii"},
            )
            out = done.stdout.decode("ascii")
            assert "\x1b" not in out
            assert any(wanted in line for line in out.splitlines())
            assert done.stderr == b""


def _file_bytes(url: str) -> bytes | None:
    parsed = parse_url(url)
    return Path(parsed.dsn).read_bytes() if parsed.is_sqlite else None


def _plain_environment() -> dict[str, str]:
    forcing = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
    return {name: value for name, value in os.environ.items() if name not in forcing}
