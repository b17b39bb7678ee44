"""What was exported, hashes of rows that no digest covers and of what was frozen, the views named `audit_*`, and on
PostgreSQL the functions that decode packed columns.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.schema.tables` says later. So do the two modules with the texts of the views and functions.

A later revision that changes a column under a view on PostgreSQL drops the view first. One that copies a table on
SQLite renames it with `legacy_alter_table` on, as 0003 does, for otherwise SQLite refuses while a view names a table
that is gone for the moment.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from tokencustody.schema.migrations import functions_0004, views_0004

revision = "0004_audit"
down_revision: str | None = "0003_prefix_sharing"
branch_labels: str | None = None
depends_on: str | None = None

# Rows that are there already have no hash, for nothing proves them.
HASHES = {
    "ledger_calls": "row_sha256",
    "ledger_failures": "row_sha256",
    "staged_attachments": "row_sha256",
    "snapshot_versions": "sealed_sha256",
}


def upgrade() -> None:
    op.create_table(
        "exports",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("export_id", sa.Text(), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.Text(), nullable=False),
        sa.Column("exported_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "export_id", name="pk_exports"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_exports_fence"
        ),
        sa.CheckConstraint("version >= 1", name="ck_exports_version"),
        sa.CheckConstraint("length(manifest_sha256) = 64", name="ck_exports_manifest_sha256"),
    )
    for table, column in HASHES.items():
        # SQLite takes a constraint only together with its column.
        check = f"CONSTRAINT ck_{table}_{column} CHECK (length({column}) = 64)"
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT {check}")
    dialect = op.get_context().dialect.name
    for statement in views_0004.views(dialect).values():
        op.execute(statement)
    if dialect == "postgresql":
        op.execute(views_0004.KEEP_DEFINITIONS)
        for statement in functions_0004.creations():
            op.execute(statement)
        op.execute(functions_0004.PIN_SEARCH_PATH)


def downgrade() -> None:
    dialect = op.get_context().dialect.name
    if dialect == "postgresql":
        for statement in functions_0004.removals():
            op.execute(statement)
    for name in reversed(views_0004.views(dialect)):
        op.execute(f"DROP VIEW {name}")
    for table, column in HASHES.items():
        # Its constraint goes with it.
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    op.drop_table("exports")
