"""Whose a view is on PostgreSQL and what others may do with it, kept where a revision drops it and makes it anew."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, text

# A view, a column of it or nothing for the whole view, and the statement that gives it back.
Kept = tuple[str, str, str]


def keep(connection: Connection, views: Iterable[str]) -> list[Kept]:
    """Return what is to be given back to these views."""
    found = connection.execute(text(_HELD), {"views": list(views)})
    return [(view, column, statement) for view, column, statement in found]


def give_back(connection: Connection, kept: Iterable[Kept]) -> None:
    """Give it back to the views of these names, but for columns that they no longer have."""
    for view, column, statement in kept:
        if not column or connection.scalar(text(_HAS_COLUMN), {"view": view, "column": column}):
            # As it is: the name of a role may have a colon in it.
            connection.exec_driver_sql(statement)


# Sorted, so that the owner comes first, who then is the one that grants.
_HELD = """
WITH kept AS (
  SELECT c.oid, c.relname, c.relowner, c.relacl FROM pg_class AS c
   WHERE c.oid = ANY (SELECT to_regclass(name) FROM unnest(CAST(:views AS text[])) AS name)
)
SELECT relname, '', format('ALTER VIEW %I OWNER TO %I', relname, pg_get_userbyid(relowner))
  FROM kept WHERE pg_get_userbyid(relowner) <> current_user
UNION ALL
SELECT relname, coalesce(attname, ''),
       format('GRANT %s %s ON %I TO %s%s', a.privilege_type, coalesce('(' || quote_ident(attname) || ')', ''), relname,
              CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END,
              CASE WHEN a.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END)
  FROM (SELECT relname, relowner, NULL AS attname, relacl AS acl FROM kept UNION ALL
        SELECT relname, relowner, attname, attacl FROM kept JOIN pg_attribute ON attrelid = kept.oid) AS held
 CROSS JOIN LATERAL aclexplode(acl) AS a
 WHERE a.grantee <> relowner
 ORDER BY 3
"""
_HAS_COLUMN = "SELECT true FROM pg_attribute WHERE attrelid = to_regclass(:view) AND attname = :column"
