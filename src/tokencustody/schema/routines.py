"""The views and functions of a database: which it should have, which it has, and making those anew that differ."""

from __future__ import annotations

from sqlalchemy import Connection, Dialect, Row, text
from sqlalchemy.exc import DBAPIError

from tokencustody.errors import SchemaMismatchError
from tokencustody.schema.migrations import functions_0004, views_0005, wording_0005


def declared(dialect: Dialect) -> set[str]:
    """Return one line for each view, and on PostgreSQL each function, of the newest revision."""
    views = {f"view {name}" for name in views_0005.views(dialect.name)}
    if dialect.name == "sqlite":
        return views
    return views | {f"function {name}" for name in functions_0004.functions()}


def look_where_they_are(connection: Connection) -> None:
    """Let the rest of a transaction find names only where the tables are, and word them in one way."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(_LOOK))


def found(connection: Connection) -> set[str]:
    """Return the same lines, read from the database, for those that it has; one that was altered says so.

    Of a view that another release of PostgreSQL worded, only that it is there is known.
    """
    if connection.dialect.name == "sqlite":
        created = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type = 'view'"))
        views = views_0005.views("sqlite")
        same = {name: statement == views.get(name) for name, statement in created if name in views}
        return {_line("view", name, same[name]) for name in same}
    lines = {_line("view", view.name, view.same) for view in _views(connection)}
    functions = functions_0004.functions()
    for name, body, as_created in connection.execute(text(_FUNCTIONS)):
        if name in functions:
            lines.add(_line("function", name, as_created and body.strip() == functions[name].strip()))
    return lines


def due(connection: Connection) -> set[str]:
    """Return the lines of what is missing, was altered or was worded by another release."""
    lines = declared(connection.dialect) - found(connection)
    if connection.dialect.name == "postgresql":
        lines |= {f"view {view.name}" for view in _views(connection) if view.elsewhere}
    return lines


def make_anew(connection: Connection, lines: set[str], shown: str) -> list[str]:
    """Make what `due` returned, and return its lines.

    Privileges stay. On PostgreSQL only the owner of the tables can; of anybody else nothing is asked. Raises
    SchemaMismatchError for a view whose columns are others, which could take what was built on it along.
    """
    if connection.dialect.name == "sqlite":
        views = views_0005.views("sqlite")
        for name in (name for name in views if f"view {name}" in lines):
            connection.execute(text(f"DROP VIEW IF EXISTS {name}"))
            connection.exec_driver_sql(views[name])
        return sorted(lines)
    if not connection.scalar(text(_IS_OWNER)):
        return []
    _make_views(connection, lines, shown)
    _make_functions(connection, lines, shown)
    return sorted(lines)


def _make_views(connection: Connection, lines: set[str], shown: str) -> None:
    views = views_0005.views("postgresql")
    wanted = [name for name in views if f"view {name}" in lines]
    for name in wanted:
        try:
            connection.exec_driver_sql(views[name].replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))
        except DBAPIError as exc:
            raise _other(exc, "view", name, shown) from exc
    if wanted:
        connection.exec_driver_sql(wording_0005.settle(wanted))


def _make_functions(connection: Connection, lines: set[str], shown: str) -> None:
    wanted = [name for name in functions_0004.functions() if f"function {name}" in lines]
    for name, statement in zip(functions_0004.functions(), functions_0004.creations(), strict=True):
        if name not in wanted:
            continue
        try:
            connection.exec_driver_sql(statement.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1))
        except DBAPIError as exc:
            raise _other(exc, "function", name, shown) from exc
    if wanted:
        connection.exec_driver_sql(functions_0004.PIN_SEARCH_PATH)


def _other(exc: DBAPIError, kind: str, name: str, shown: str) -> Exception:
    # It has other columns, another result or other names of arguments, or a table stands in its place.
    if getattr(exc.orig, "sqlstate", None) not in ("42P16", "42P13", "42809"):
        return exc
    return SchemaMismatchError(
        f"{shown} has another {name} than the {kind} that this library makes: look at what uses it, drop or rename it, "
        f"and run `tokencustody db upgrade --url {shown}` again"
    )


def _line(kind: str, name: str, same: bool) -> str:
    return f"{kind} {name}" if same else f"{kind} {name}, altered"


def _views(connection: Connection) -> list[Row[tuple[str, bool, bool]]]:
    """Return the name of each view of ours, whether it is as it was made, and whether another release worded it."""
    views = views_0005.views("postgresql")
    return [row for row in connection.execute(text(_VIEWS)) if row.name in views]


_COMMENT = "coalesce(obj_description(c.oid, 'pg_class'), '')"
_ELSEWHERE = f"({_COMMENT} LIKE 'tokencustody %' AND NOT {_COMMENT} LIKE {wording_0005.RELEASE} || ' %')"
_VIEWS = f"""
SELECT c.relname AS name,
       {_ELSEWHERE} OR {_COMMENT} = {wording_0005.RELEASE} || ' ' || md5(pg_get_viewdef(c.oid)) AS same,
       {_ELSEWHERE} AS elsewhere
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relkind = 'v' AND n.nspname = current_schema()
"""  # noqa: S608 - constants
_LOOK = """
SELECT set_config('search_path', quote_ident(n.nspname), true), set_config('quote_all_identifiers', 'off', true)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('fences')
"""
_IS_OWNER = (
    "SELECT pg_has_role(current_user, relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass('fences')"
)
_FUNCTIONS = """
SELECT p.proname, p.prosrc,
       NOT p.prosecdef AND p.proconfig = ARRAY[format('search_path=pg_catalog, %I, pg_temp', current_schema())]
  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
 WHERE n.nspname = current_schema()
"""
