"""The wording in which PostgreSQL keeps the views of revision 0005, and by which `schema.routines` knows them again.

PostgreSQL rewords what it is given, and once more what it worded itself, as a dump and its restore let it do. So each
view is created anew from its own wording until that stays as it is, and a comment on the view keeps the hash of it,
with the release of the server, for another one may word the same view otherwise. A dump carries both.
"""

# ruff: noqa: S608 - SQL put together from constants
from __future__ import annotations

from collections.abc import Iterable

RELEASE = "'tokencustody ' || current_setting('server_version_num')::integer / 10000"


def settle(views: Iterable[str]) -> str:
    """Return the statement that settles the wording of these views, in the first schema of the search path."""
    return f"""DO $do$
DECLARE
  held record;
  before text;
  worded text;
BEGIN
  PERFORM set_config('quote_all_identifiers', 'off', true);
  FOR held IN SELECT c.oid, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relname IN ({", ".join(map(repr, views))})
  LOOP
    worded := pg_get_viewdef(held.oid);
    FOR round IN 1..10 LOOP
      before := worded;
      EXECUTE format('CREATE OR REPLACE VIEW %I AS %s', held.relname, worded);
      worded := pg_get_viewdef(held.oid);
      EXIT WHEN worded = before;
    END LOOP;
    EXECUTE format('COMMENT ON VIEW %I IS %L', held.relname, {RELEASE} || ' ' || md5(worded));
  END LOOP;
END
$do$"""
