"""The number of the newest revision that shuts out libraries which do not know it, kept as a wire schema.

A library that reads it works with later revisions, as long as none of them raises it. Names and types are written out:
this file keeps saying what it said when it was released, whatever `tokencustody.schema.tables` says later.
"""

from __future__ import annotations

from alembic import op

revision = "0006_tables_version"
down_revision: str | None = "0005_late_ledger"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.execute("INSERT INTO wire_schema (name, version) VALUES ('tables', 6)")


def downgrade() -> None:
    op.execute("DELETE FROM wire_schema WHERE name = 'tables'")
