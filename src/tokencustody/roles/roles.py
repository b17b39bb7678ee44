"""What each role of a PostgreSQL database may do with each table, as privileges and row security policies.

A policy says which rows a role meets, and which rows it may leave behind. The history of a rollout, which no role can
change, tells the policies what its fence may become: versions are counted one by one, what was marked stays
incomplete, what was frozen is never open again, and what was retired stays so.
"""

# ruff: noqa: S608 - what is put into these statements is written here, or quoted

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Table

from tokencustody.schema.tables import (
    OF_ROLLOUTS,
    entries,
    exports,
    failures,
    fences,
    intents,
    ledger_calls,
    ledger_failures,
    snapshot_versions,
    staged_attachments,
    staged_calls,
    wire_schema,
)
from tokencustody.states import FailureKind, FenceState, Role, VersionEvent


@dataclass(frozen=True, slots=True)
class Access:
    """What a role may do with the rows of one table that are of its runs.

    `read` and `update` name columns. `insert`, `updatable` and `updated` are conditions, in SQL, on a new row, a row
    before and a row after; a row that is `updatable` can be locked, whatever `updated` says.
    """

    read: tuple[str, ...]
    insert: str | None = None
    update: tuple[str, ...] = ()
    updatable: str = "true"
    updated: str = "false"
    delete: bool = False


SECURED = OF_ROLLOUTS
# What every store reads when it is opened.
OPENING = (wire_schema.name, "alembic_version")
# Columns that hold token ids, log probabilities or what came with them.
TOKEN_DATA = {
    (entries.name, "payload"),
    (staged_calls.name, "payload"),
    (staged_calls.name, "extras"),
    (staged_attachments.name, "data"),
}
POLICY_PREFIX = "tokencustody_"


def _all(table: Table) -> tuple[str, ...]:
    return tuple(table.c.keys())


def _fence_of(table: Table, column: str, condition: str = "") -> str:
    # A scalar subquery: EXISTS may be planned as a scan of every fence.
    return (
        f"(SELECT f.{column} FROM {{schema}}.fences AS f"
        f" WHERE f.run = {table.name}.run AND f.rollout_id = {table.name}.rollout_id"
        f"{condition and f' AND {condition}'})"
    )


def _last(*events: VersionEvent) -> str:
    """Return the version that the last of these events made, of all events without any."""
    names = ", ".join(f"'{event}'" for event in events)
    return (
        "(SELECT max(v.version) FROM {schema}.snapshot_versions AS v"
        " WHERE v.run = fences.run AND v.rollout_id = fences.rollout_id"
        f"{f' AND v.event IN ({names})' if events else ''})"
    )


def _is_open(table: Table) -> str:
    # A statement that opens the fence as well does not see it yet.
    return f"coalesce({_fence_of(table, 'state')}, '{FenceState.OPEN}') = '{FenceState.OPEN}'"


def _is_not_retired(table: Table) -> str:
    return f"coalesce({_fence_of(table, 'state')}, '{FenceState.OPEN}') <> '{FenceState.RETIRED}'"


_OPENED = (
    f"state = '{FenceState.OPEN}' AND version = 0 AND NOT incomplete"
    " AND snapshot_id IS NULL AND frozen_at IS NULL AND retired_at IS NULL"
)
_ADVANCED = (
    f"version = 1 + {_last()} AND {_last(VersionEvent.DROP, VersionEvent.RETIRE)} IS NULL"
    f" AND (incomplete OR {_last(VersionEvent.MARK, VersionEvent.CONFLICT)} IS NULL)"
)
# What the fence is once the event has happened to it.
_AFTER = {
    VersionEvent.CONFLICT: "f.incomplete",
    VersionEvent.MARK: "f.incomplete",
    VersionEvent.REFUSAL: f"f.state = '{FenceState.OPEN}'",
    VersionEvent.LATE_LEDGER: f"f.state = '{FenceState.FROZEN}'",
    VersionEvent.LATE_STAGE: f"f.state = '{FenceState.FROZEN}'",
    VersionEvent.FREEZE: f"f.state = '{FenceState.FROZEN}'",
    VersionEvent.DROP: f"f.state = '{FenceState.RETIRED}'",
    VersionEvent.RETIRE: f"f.state = '{FenceState.RETIRED}'",
}


def _happened(*events: VersionEvent) -> str:
    after = " ".join(f"WHEN '{event}' THEN {_AFTER[event]}" for event in events)
    fence = _fence_of(snapshot_versions, "version", f"CASE snapshot_versions.event {after} END")
    return f"CASE WHEN event = '{VersionEvent.OPEN}' THEN version = 0 ELSE version >= 1 AND version = {fence} END"


_FAILED = f"version = {_fence_of(failures, 'version', 'f.incomplete')}"

ACCESS: Mapping[Role, Mapping[Table, Access]] = {
    Role.WORKER: {
        fences: Access(
            _all(fences),
            insert=_OPENED,
            update=("version", "incomplete"),
            updated=_ADVANCED,
        ),
        snapshot_versions: Access(
            _all(snapshot_versions),
            insert=_happened(
                VersionEvent.CONFLICT,
                VersionEvent.MARK,
                VersionEvent.REFUSAL,
                VersionEvent.LATE_LEDGER,
                VersionEvent.LATE_STAGE,
            ),
        ),
        failures: Access(_all(failures), insert=_FAILED),
        entries: Access(_all(entries), insert=_is_open(entries)),
        intents: Access(
            _all(intents),
            insert=f"refusal_code IS NULL AND refused_at IS NULL AND {_is_open(intents)}",
            update=("refusal_code", "refused_at"),
            updatable="refused_at IS NULL",
            updated=_is_open(intents),
        ),
        ledger_calls: Access(_all(ledger_calls), insert=_is_not_retired(ledger_calls)),
        ledger_failures: Access(_all(ledger_failures), insert=_is_not_retired(ledger_failures)),
        # A column to update, or the rows could not be locked.
        staged_calls: Access(_all(staged_calls), insert="true", update=("staged_at",)),
        staged_attachments: Access(_all(staged_attachments), insert="true"),
        exports: Access(_all(exports)),
    },
    Role.TRAINER: {
        fences: Access(
            _all(fences),
            insert=_OPENED,
            update=("state", "version", "snapshot_id", "incomplete", "frozen_at", "retired_at"),
            updated=f"{_ADVANCED} AND (state <> '{FenceState.OPEN}'"
            f" OR (incomplete AND {_last(VersionEvent.FREEZE)} IS NULL))",
        ),
        snapshot_versions: Access(
            _all(snapshot_versions),
            insert=_happened(VersionEvent.MARK, VersionEvent.FREEZE, VersionEvent.DROP, VersionEvent.RETIRE),
        ),
        failures: Access(_all(failures), insert=f"kind = '{FailureKind.MARK}' AND {_FAILED}", delete=True),
        exports: Access(_all(exports), insert="true"),
        staged_calls: Access(_all(staged_calls), update=("staged_at",), delete=True),
        **{
            table: Access(_all(table), delete=True)
            for table in (entries, intents, ledger_calls, ledger_failures, staged_attachments)
        },
    },
    Role.AUDITOR: {
        table: Access(tuple(name for name in _all(table) if (table.name, name) not in TOKEN_DATA))
        for table in SECURED
    },
}

# A table, a column or "" for the whole table, and the privilege.
Privilege = tuple[str, str, str]


def privileges(role: Role, runs: Sequence[str] | None, views: Sequence[str]) -> set[Privilege]:
    """Return everything that a role of these runs, None for all, may do; of `views` it may read every column."""
    held = {(name, "", "SELECT") for name in OPENING}
    if runs is None:
        held |= {(view, "", "SELECT") for view in views}
    for table, access in ACCESS[role].items():
        held |= {(table.name, column, "SELECT") for column in access.read}
        held |= {(table.name, column, "UPDATE") for column in access.update}
        if access.insert is not None:
            held.add((table.name, "", "INSERT"))
        if access.delete:
            held.add((table.name, "", "DELETE"))
    return held


def grants(
    role: Role, runs: Sequence[str] | None, *, name: str, oid: int, schema: str, views: Sequence[str]
) -> Iterator[str]:
    """Write the statements that give a role, which has nothing yet, what it may do."""
    user, schema = identifier(name), identifier(schema)
    yield f"GRANT USAGE ON SCHEMA {schema} TO {user}"
    # A view reads with its owner's rights, the rows of every run.
    readable = [*OPENING, *(views if runs is None else ())]
    yield f"GRANT SELECT ON {', '.join(f'{schema}.{identifier(each)}' for each in readable)} TO {user}"
    for table, access in ACCESS[role].items():
        whole = access.read == _all(table)
        given = ["SELECT" if whole else f"SELECT ({', '.join(access.read)})"]
        if access.insert is not None:
            given.append("INSERT")
        if access.update:
            given.append(f"UPDATE ({', '.join(access.update)})")
        if access.delete:
            given.append("DELETE")
        yield f"GRANT {', '.join(given)} ON {schema}.{table.name} TO {user}"
        for command, condition in _policies(access, _of_runs(runs), schema):
            yield (
                f"CREATE POLICY {policy(command, oid, name)} ON {schema}.{table.name}"
                f" FOR {command} TO {user} {condition}"
            )


def policy(command: str, oid: int, name: str) -> str:
    """Return the name of a role's policy for one command, which no other role's has.

    Its number alone could be that of another role on the server where a dump is restored.
    """
    return f"{POLICY_PREFIX}{command.lower()}_{oid}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def identifier(name: str) -> str:
    """Return a name as SQL, whatever characters it has."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """Return a text without backslashes as SQL."""
    return "'" + text.replace("'", "''") + "'"


def _of_runs(runs: Sequence[str] | None) -> str:
    if runs is None:
        return "true"
    return f"run IN ({', '.join(map(literal, runs))})"


def _policies(access: Access, own: str, schema: str) -> Iterator[tuple[str, str]]:
    def rows(condition: str) -> str:
        if condition == "true":
            return f"({own})"
        return f"({own} AND {condition.replace('{schema}', schema)})"

    yield "SELECT", f"USING ({own})"
    if access.insert is not None:
        yield "INSERT", f"WITH CHECK {rows(access.insert)}"
    if access.update:
        yield "UPDATE", f"USING {rows(access.updatable)} WITH CHECK {rows(access.updated)}"
    if access.delete:
        yield "DELETE", f"USING ({own})"
