"""What was exported, the views named `audit_*`, and on PostgreSQL the functions that decode packed columns.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.sql.tables` says later.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_audit"
down_revision: str | None = "0003_prefix_sharing"
branch_labels: str | None = None
depends_on: str | None = None


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


def downgrade() -> None:
    op.drop_table("exports")
