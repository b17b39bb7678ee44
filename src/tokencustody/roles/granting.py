"""Giving roles of a PostgreSQL database what `roles.roles` lets them do, taking it away, and telling who has what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import RoleError, StoreUnavailableError
from tokencustody.roles.catalogue import Granted, Place
from tokencustody.roles.roles import SECURED, Privilege, identifier, privileges
from tokencustody.schema import migrate
from tokencustody.states import Role

Result = TypeVar("Result")

# In seconds. While a grant waits for its locks, every writer waits behind it.
_LONGEST_WAIT = 5.0
_CANCELED = "57014"


@dataclass(frozen=True, slots=True)
class Roles:
    """Who has what in a database. `others` hold privileges that somebody granted by hand."""

    url: str
    owner: str
    row_security: bool
    granted: tuple[Granted, ...]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a grant or a revocation did, or would do: its statements, what the role has then, what else to know."""

    url: str
    name: str
    granted: Granted | None
    statements: tuple[str, ...]
    notes: tuple[str, ...] = ()


def grant(
    url: str, role: Role, name: str, runs: Sequence[str] = (), *, force: bool = False, dry_run: bool = False
) -> Change:
    """Let the existing role `name` be what `role` says, for `runs` besides those it has, or for all without any.

    Repeating it brings a role up to date after an upgrade. With `dry_run` nothing is changed. Turns on row security,
    after which roles with privileges of another making see no rows: without `force` that is refused. Raises RoleError,
    SchemaMismatchError, StoreUnavailableError; none leaves anything changed.
    """

    def work(connection: Connection, shown: str) -> Change:
        place = Place.found(connection, shown)
        place.refuse_unless_owner(connection)
        oid = place.role_oid(connection, name)
        place.refuse_if_unbound(connection, name)
        granted = Granted(name, role, _joined(place.granted.get(name), role, name, runs), place.revision)
        others = [other for other in place.others if other != name]
        if others and not place.row_security and not force:
            raise RoleError(
                f"row security would leave {', '.join(others)}, who hold privileges on the tables of {shown} "
                "that were granted by hand, without any row: revoke those and grant them a role afterwards, or repeat "
                "this with --force"
            )
        statements = [
            *place.taking_away(connection, name),
            *place.giving(granted, oid),
            *(f"ALTER TABLE {place.qualified(table.name)} ENABLE ROW LEVEL SECURITY" for table in SECURED),
        ]
        if not dry_run:
            _execute(connection, place, statements)
            _refuse_if_more(connection, place, granted)
        return Change(shown, name, granted, tuple(statements), place.notes(connection, name))

    return _changing(url, work)


def revoke(url: str, name: str, runs: Sequence[str] = (), *, dry_run: bool = False) -> Change:
    """Take everything from the role `name`, or with `runs` only those; it keeps the others.

    With the last role that was granted, row security is turned off again, unless others hold privileges by hand, who
    would then see every row. `statements` is empty when there is nothing to take. Errors as for `grant`.
    """

    def work(connection: Connection, shown: str) -> Change:
        place = Place.found(connection, shown)
        place.refuse_unless_owner(connection)
        oid = place.role_oid(connection, name)
        held = place.granted.get(name)
        kept = () if held is None or not runs else _without(held, runs)
        if held is None and (runs or name not in place.others):
            return Change(shown, name, None, ())
        statements = place.taking_away(connection, name)
        granted, notes = None, []
        if held is not None and kept:
            granted = Granted(name, held.role, kept, place.revision)
            statements += place.giving(granted, oid)
        else:
            statements.append(f"REVOKE USAGE ON SCHEMA {identifier(place.schema)} FROM {identifier(name)}")
            others = [other for other in place.others if other != name]
            if place.granted.keys() <= {name} and place.row_security and not others:
                statements += (
                    f"ALTER TABLE {place.qualified(table.name)} DISABLE ROW LEVEL SECURITY"
                    for table in SECURED
                )
            elif place.granted.keys() <= {name} and place.row_security:
                notes.append(
                    f"row security stays on, for {', '.join(others)} hold privileges that were granted by hand and "
                    "would see every row"
                )
        if not dry_run:
            _execute(connection, place, statements)
        return Change(shown, name, granted, tuple(statements), tuple(notes))

    return _changing(url, work)


def roles(url: str) -> Roles:
    """Return who has what in a database. Changes nothing. Errors as for `grant`."""

    def work(connection: Connection, shown: str) -> Roles:
        place = Place.found(connection, shown)
        granted = [_checked(connection, place, each) for each in place.granted.values()]
        return Roles(shown, place.owner, place.row_security, tuple(granted), place.others)

    return _changing(url, work)


def _changing(url: str, work: Callable[[Connection, str], Result]) -> Result:
    """Run `work` in the transaction in which a database may be migrated, so that neither overtakes the other."""
    target: DatabaseUrl = parse_url(url)
    if target.is_sqlite:
        raise RoleError(
            f"{target.display} is SQLite, which has no roles: whoever may read the file reads all of it, so guard it "
            "by its mode, or use PostgreSQL"
        )
    try:
        return migrate.in_transaction(target, lambda connection: work(connection, target.display))
    except StoreUnavailableError as exc:
        cause = exc.__cause__.orig if isinstance(exc.__cause__, DBAPIError) else exc.__cause__
        if getattr(cause, "sqlstate", None) != _CANCELED:
            raise
        raise RoleError(
            f"the tables of {target.display} were in use by other transactions for {_LONGEST_WAIT:g} seconds; nothing "
            "was changed: try again, when no long query or backup runs"
        ) from exc


def _execute(connection: Connection, place: Place, statements: Sequence[str]) -> None:
    connection.exec_driver_sql(f"SET LOCAL statement_timeout = {1000 * _LONGEST_WAIT:.0f}")
    # All of them, first, in the order in which writers come to them: a fence comes before what belongs to it.
    tables = ", ".join(place.qualified(table.name) for table in SECURED)
    connection.exec_driver_sql(f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE")
    for statement in statements:
        connection.exec_driver_sql(statement)


def _joined(held: Granted | None, role: Role, name: str, runs: Sequence[str]) -> tuple[str, ...] | None:
    if held is not None and held.role is not role:
        raise RoleError(f"{name} is {held.role} already: `tokencustody db revoke {name}` first")
    if held is not None and held.runs is None and runs:
        raise RoleError(
            f"{name} is {held.role} of all runs already: `tokencustody db revoke {name}` first, to limit it to some"
        )
    if not runs:
        return None
    return tuple(sorted({*runs, *(held.runs or () if held else ())}))


def _without(held: Granted, runs: Sequence[str]) -> tuple[str, ...]:
    missing = sorted(set(runs) - set(held.runs or ()))
    if missing:
        of = "all runs" if held.runs is None else f"runs {', '.join(held.runs)}"
        raise RoleError(f"{held.name} is {held.role} of {of}, not in particular of {', '.join(missing)}")
    return tuple(run for run in held.runs or () if run not in runs)


def _differences(
    connection: Connection, place: Place, granted: Granted
) -> tuple[set[Privilege], set[Privilege]]:
    """Return what a role lacks, and what it may do besides, by whatever way."""
    due = privileges(granted.role, granted.runs, place.views)
    held = place.held(connection, granted.name)
    # A privilege on the table is found at each of its columns.
    whole = {(relation, privilege) for relation, column, privilege in due if not column}
    columns = {(relation, privilege) for relation, column, privilege in held if column}
    more = {each for each in held - due if (each[0], each[2]) not in whole}
    less = {each for each in due - held if each[1] or (each[0], each[2]) not in columns}
    return less, more


def _refuse_if_more(connection: Connection, place: Place, granted: Granted) -> None:
    _, more = _differences(connection, place, granted)
    if more:
        raise RoleError(
            f"{granted.name} would have more than a {granted.role} may, by PUBLIC or by roles of which it is a member: "
            f"{_named(more)}; revoke that there first"
        )
    policies = place.foreign_policies(connection, granted.name)
    if policies:
        raise RoleError(
            f"policies of another making would widen what {granted.name} sees: {', '.join(policies)}; drop them first"
        )


def _checked(connection: Connection, place: Place, granted: Granted) -> Granted:
    less, more = _differences(connection, place, granted)
    problems = []
    if granted.revision != place.revision:
        problems.append(f"was granted at {granted.revision}, before the upgrade: grant it again")
    if less:
        problems.append(f"lacks {_named(less)}: grant it again")
    if more:
        problems.append(f"has besides {_named(more)}: revoke that")
    if not place.row_security:
        problems.append("row security was turned off: grant it again")
    return Granted(granted.name, granted.role, granted.runs, granted.revision, tuple(problems))


def _named(held: set[Privilege]) -> str:
    by_relation: dict[tuple[str, str], list[str]] = {}
    for relation, column, privilege in sorted(held):
        by_relation.setdefault((privilege, relation), []).append(column)
    return ", ".join(
        f"{privilege} on {relation}"
        + (f" ({', '.join(columns)})" if any(columns) and len(columns) <= 3 else "")
        for (privilege, relation), columns in sorted(by_relation.items())
    )
