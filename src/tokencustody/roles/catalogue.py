"""What the catalogues of a PostgreSQL database say about our tables: whose they are, and who may do what with them.

What a role was granted is kept in the comment of its policy on `fences`, so that it travels with the database.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from tokencustody.errors import RoleError
from tokencustody.roles.roles import (
    OPENING,
    POLICY_PREFIX,
    SECURED,
    Privilege,
    grants,
    identifier,
    literal,
    policy,
)
from tokencustody.schema import revisions
from tokencustody.states import Role

# They see or change the server's files, the log of all databases, or any role.
_POWERS = {
    "rolsuper": "a superuser",
    "rolbypassrls": "allowed to bypass row security",
    "rolcreaterole": "allowed to create roles",
    "rolreplication": "allowed to replicate the server",
}
_POWERFUL = ("pg_read_server_files", "pg_write_server_files", "pg_execute_server_program")


@dataclass(frozen=True, slots=True)
class Granted:
    """What a role was granted: `runs` is None for all of them. `problems` say in what it is not so any more."""

    name: str
    role: Role
    runs: tuple[str, ...] | None
    revision: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """The tables as a transaction finds them."""

    shown: str
    revision: str
    schema: str
    owner: str
    row_security: bool
    views: tuple[str, ...]
    granted: dict[str, Granted]
    others: tuple[str, ...]

    @classmethod
    def found(cls, connection: Connection, shown: str) -> Place:
        revision = revisions.ensure_known(connection, shown)
        at = connection.execute(_TABLES, _NAMES).one()
        views = tuple(connection.scalars(_VIEWS, {"schema": at.schema}))
        recorded = connection.execute(_RECORDED, {"prefix": POLICY_PREFIX}).all()
        granted = {row.rolname: _granted(row.rolname, row.record) for row in recorded}
        by_hand = connection.scalars(_BY_HAND, _NAMES)
        others = tuple(name for name in by_hand if name not in granted)
        return cls(shown, revision, at.schema, at.owner, at.row_security, views, granted, others)

    def qualified(self, relation: str) -> str:
        return f"{identifier(self.schema)}.{identifier(relation)}"

    @property
    def relations(self) -> list[str]:
        return [*(table.name for table in SECURED), *OPENING, *self.views]

    def refuse_unless_owner(self, connection: Connection) -> None:
        user, is_owner = connection.execute(
            text("SELECT current_user, pg_has_role(current_user, CAST(:owner AS name), 'USAGE')"),
            {"owner": self.owner},
        ).one()
        if not is_owner:
            raise RoleError(
                f"only {self.owner}, who owns the tables of {self.shown}, can grant and revoke roles, not {user}: "
                f"connect as {self.owner}"
            )

    def role_oid(self, connection: Connection, name: str) -> int:
        oid: int | None = connection.scalar(_OID, {"name": name}) if "\0" not in name else None
        if oid is None:
            raise RoleError(
                f"the server of {self.shown} has no role {name}: create it with "
                f"`CREATE ROLE {identifier(name)} LOGIN;`, and give it a password or a rule in pg_hba.conf"
            )
        return oid

    def refuse_if_unbound(self, connection: Connection, name: str) -> None:
        """Refuse a role that privileges and row security do not bind."""
        asked = {"name": name, "owner": self.owner, "schema": self.schema}
        found = connection.execute(_UNBOUND, asked).one()
        why = [text for power, text in _POWERS.items() if getattr(found, power)]
        if not found.rolsuper:  # who is a member of every role
            why += [f"a member of {each}" for each in found.memberships]
            if found.owns_schema:
                why.append("an owner of the schema")
            if found.is_owner:
                why = [
                    "the owner of the tables"
                    if name == self.owner
                    else f"a member of {self.owner}, their owner"
                ]
        if why:
            raise RoleError(
                f"{name} is {' and '.join(why)}, whom row security and privileges do not bind: grant roles to users "
                "without such powers"
            )
        others = [each for each in self.granted if each != name and each in found.related]
        if others:
            raise RoleError(
                f"{name} is a member of {', '.join(others)}, or has it as a member, so that one would have what the "
                "other was granted besides: end that first, or grant a role to one of them only"
            )

    def taking_away(self, connection: Connection, name: str) -> list[str]:
        """Return the statements that take everything from a role but the use of the schema."""
        user = identifier(name)
        found = connection.execute(_POLICIES, {"name": name, "prefix": POLICY_PREFIX, **_NAMES}).all()
        return [
            *(f"DROP POLICY {identifier(row.polname)} ON {self.qualified(row.relname)}" for row in found),
            f"REVOKE ALL ON {', '.join(map(self.qualified, self.relations))} FROM {user}",
        ]

    def giving(self, granted: Granted, oid: int) -> list[str]:
        """Return the statements that give a role, which has nothing, what it was granted, and keep a record of it."""
        runs, name = granted.runs, granted.name
        record = json.dumps({"role": granted.role, "runs": runs, "revision": granted.revision})
        return [
            *grants(granted.role, runs, name=name, oid=oid, schema=self.schema, views=self.views),
            f"COMMENT ON POLICY {policy('SELECT', oid, name)} ON {self.qualified('fences')} IS {literal(record)}",
        ]

    def notes(self, connection: Connection, name: str) -> tuple[str, ...]:
        """Return what else a person should know, or do, for a role."""
        allowed = connection.execute(_AROUND, {"name": name, "schema": self.schema}).one()
        notes = []
        others = [other for other in self.others if other != name]
        if others:
            notes.append(
                f"{', '.join(others)} hold privileges that were granted by hand; they see no rows until they are "
                "granted a role"
            )
        if not allowed.can_connect:
            notes.append(
                f"{name} may not connect yet: GRANT CONNECT ON DATABASE {identifier(allowed.database)} TO "
                f"{identifier(name)};"
            )
        if allowed.can_create:
            notes.append(
                f"{name} may create tables and functions in the schema: REVOKE CREATE ON SCHEMA "
                f"{identifier(self.schema)} FROM PUBLIC;"
            )
        return tuple(notes)

    def foreign_policies(self, connection: Connection, name: str) -> list[str]:
        """Return the policies of another making that let a role see more rows."""
        found = connection.execute(_FOREIGN_POLICIES, {"name": name, "prefix": POLICY_PREFIX, **_NAMES})
        return [f"{row.polname} on {row.relname}" for row in found]

    def held(self, connection: Connection, name: str) -> set[Privilege]:
        """Return everything that a role may do with our tables and views, by whatever way."""
        found = connection.execute(
            _EFFECTIVE, {"name": name, "schema": self.schema, "relations": self.relations}
        )
        return {(row.relname, row.column, row.privilege) for row in found}


_NAMES = {"tables": [table.name for table in SECURED]}
# `to_regclass`, for the tables are where the search path finds them, as for every other statement of this library.
_OURS = "ANY (SELECT to_regclass(name) FROM unnest(CAST(:tables AS text[])) AS name)"
# ruff: noqa: S608 - what is put into these statements is written here
_TABLES = text(
    "SELECT n.nspname AS schema, pg_get_userbyid(c.relowner) AS owner,"
    f" (SELECT bool_and(t.relrowsecurity) FROM pg_class t WHERE t.oid = {_OURS}) AS row_security"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass('fences')"
)
_VIEWS = text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    r" WHERE n.nspname = :schema AND c.relkind = 'v' AND c.relname LIKE 'audit\_%' ORDER BY c.relname"
)
_RECORDED = text(
    "SELECT r.rolname, obj_description(p.oid, 'pg_policy') AS record"
    " FROM pg_policy p JOIN pg_roles r ON p.polroles = ARRAY[r.oid]"
    " WHERE p.polrelid = to_regclass('fences') AND starts_with(p.polname, :prefix)"
    " AND obj_description(p.oid, 'pg_policy') IS NOT NULL ORDER BY r.rolname"
)
_POLICIES = text(
    "SELECT c.relname, p.polname FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid"
    f" WHERE c.oid = {_OURS} AND starts_with(p.polname, :prefix)"
    " AND p.polroles = ARRAY(SELECT oid FROM pg_roles WHERE rolname = :name) ORDER BY 1, 2"
)
_FOREIGN_POLICIES = text(
    "SELECT c.relname, p.polname FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid"
    f" WHERE c.oid = {_OURS} AND p.polpermissive AND NOT starts_with(p.polname, :prefix) AND EXISTS ("
    "SELECT FROM unnest(p.polroles) AS held WHERE held = 0 OR pg_has_role(CAST(:name AS name), held, 'MEMBER'))"
    " ORDER BY 1, 2"
)
_BY_HAND = text(
    "SELECT DISTINCT coalesce(r.rolname, 'PUBLIC') AS name FROM ("
    f"SELECT relowner, relacl AS acl FROM pg_class WHERE oid = {_OURS} UNION ALL "
    f"SELECT c.relowner, a.attacl FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.oid = {_OURS}"
    ") AS held CROSS JOIN LATERAL aclexplode(acl) AS item LEFT JOIN pg_roles r ON r.oid = item.grantee"
    " WHERE item.grantee <> held.relowner AND NOT coalesce(r.rolsuper OR r.rolbypassrls, false) ORDER BY 1"
)
_OID = text("SELECT CAST(oid AS bigint) FROM pg_roles WHERE rolname = :name")
_UNBOUND = text(
    f"SELECT {', '.join(_POWERS)}, pg_has_role(rolname, CAST(:owner AS name), 'MEMBER') AS is_owner,"
    " pg_has_role(rolname, (SELECT nspowner FROM pg_namespace WHERE nspname = :schema), 'MEMBER') AS owns_schema,"
    f" ARRAY(SELECT g.rolname FROM pg_roles g WHERE (g.rolname IN {_POWERFUL}"
    f" OR {' OR '.join(f'g.{power}' for power in _POWERS)})"
    " AND g.oid <> r.oid AND pg_has_role(r.rolname, g.oid, 'MEMBER') ORDER BY 1) AS memberships,"
    " ARRAY(SELECT g.rolname FROM pg_roles g WHERE pg_has_role(r.rolname, g.oid, 'MEMBER')"
    " OR pg_has_role(g.rolname, r.oid, 'MEMBER')) AS related"
    " FROM pg_roles r WHERE rolname = :name"
)
_AROUND = text(
    "SELECT current_database() AS database,"
    " has_database_privilege(CAST(:name AS name), current_database(), 'CONNECT') AS can_connect,"
    " has_schema_privilege(CAST(:name AS name), :schema, 'CREATE') AS can_create"
)
_EFFECTIVE = text(
    "SELECT c.relname, a.attname AS column, p.privilege"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped"
    " CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'REFERENCES']) AS p (privilege)"
    " WHERE n.nspname = :schema AND c.relname = ANY (CAST(:relations AS text[]))"
    " AND has_column_privilege(CAST(:name AS name), c.oid, a.attnum, p.privilege)"
    " UNION ALL SELECT c.relname, '', p.privilege FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " CROSS JOIN unnest(ARRAY['DELETE', 'TRUNCATE', 'TRIGGER']) AS p (privilege)"
    " WHERE n.nspname = :schema AND c.relname = ANY (CAST(:relations AS text[]))"
    " AND has_table_privilege(CAST(:name AS name), c.oid, p.privilege)"
)


def _granted(name: str, record: str) -> Granted:
    try:
        found: dict[str, Any] = json.loads(record)
        runs = None if found["runs"] is None else tuple(map(str, found["runs"]))
        return Granted(name, Role(found["role"]), runs, str(found["revision"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise RoleError(
            f"the comment of the policy of {name} on the table fences was changed by hand: drop that policy, and grant "
            "the role again"
        ) from exc
