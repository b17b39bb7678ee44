"""What roles may read of the views stays theirs when a database is upgraded, and when it is taken back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.roles.secured import Secured, secured_database
from tests.support.postgres import Server, fetch
from tokencustody.roles.granting import grant, roles
from tokencustody.roles.roles import identifier
from tokencustody.schema import migrate
from tokencustody.states import Role

BEFORE = "0004_audit"
_HELD = """
SELECT c.relname, pg_get_userbyid(c.relowner), c.relacl::text,
       (SELECT array_agg(a.attname || a.attacl::text ORDER BY a.attname) FROM pg_attribute AS a
         WHERE a.attrelid = c.oid AND a.attacl IS NOT NULL)::text
  FROM pg_class AS c WHERE c.relkind = 'v' AND c.relname LIKE 'audit%' ORDER BY 1
"""


@pytest.fixture
def auditors(postgres: Server) -> Iterator[tuple[Secured, str]]:
    """A database with an auditor, a user who was granted some by hand, and one more."""
    with secured_database(postgres, 'au"dit: or', "by hand", "other") as (
        database,
        (auditor, by_hand, other),
    ):
        grant(database.url, Role.AUDITOR, auditor)
        for privilege, view, user in (
            ("SELECT", "audit_ledger", f"{identifier(by_hand)} WITH GRANT OPTION"),
            ("SELECT (run, rollout_id), INSERT (run)", "audit_exports", identifier(by_hand)),
            ("SELECT (is_held)", "audit_exports", identifier(other)),
            ("SELECT", "audit_versions", "PUBLIC"),
        ):
            fetch(database.url, f"GRANT {privilege} ON {view} TO {user}")
        yield database, auditor


@pytest.mark.parametrize("by_whom", ["owner", "superuser"])
def test_whoever_may_read_a_view_still_may_after_a_downgrade_and_an_upgrade(
    auditors: tuple[Secured, str], by_whom: str
) -> None:
    database, auditor = auditors
    before = fetch(database.url, _HELD)
    url = database.url if by_whom == "owner" else database.admin_url
    migrate.downgrade(url, BEFORE)
    after = fetch(database.url, _HELD)
    assert [row[:3] for row in after] == [row[:3] for row in before]
    # But for the column that this revision brought.
    (had,), (has,) = ([row[3] for row in rows if row[3]] for rows in (before, after))
    assert ("is_held" in had, "is_held" in has, "rollout_id" in has) == (True, False, True)
    assert fetch(database.url_as(auditor), "SELECT count(*) FROM audit_exports")[0][0] == 0
    migrate.upgrade(url)
    assert fetch(database.url, _HELD) == after
    (granted,) = roles(database.url).granted
    # Columns of tables that the upgrade brings are for a grant to give, as docs/roles.md says.
    assert granted.problems == ("lacks SELECT on staged_calls (attachments_sha256): grant it again",)
