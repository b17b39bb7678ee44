"""The ledger of calls that workers stage, and what they stage.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.schema.tables` says later.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_staging"
down_revision: str | None = "0001_capture"
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "ledger_calls",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("staging_key", sa.Text(), nullable=False),
        sa.Column("capture_key", sa.Text(), nullable=True),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("parent_call_id", sa.Text(), nullable=True),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("prev_len", sa.BigInteger(), nullable=False),
        sa.Column("delta_len", sa.BigInteger(), nullable=False),
        sa.Column("cum_len", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("extras_digest", sa.Text(), nullable=False),
        sa.Column("chain_hash", sa.Text(), nullable=True),
        sa.Column("cumulative_hash", sa.Text(), nullable=False),
        sa.Column("output_fingerprint", sa.Text(), nullable=True),
        sa.Column("continuation_fingerprint", sa.Text(), nullable=True),
        sa.Column("fingerprint_version", sa.BigInteger(), nullable=False),
        sa.Column("continuation_context_len", sa.BigInteger(), nullable=False),
        sa.Column("continuation_context_digest", sa.Text(), nullable=False),
        sa.Column("staging_chain", sa.Text(), nullable=False),
        sa.Column("admitted_at", sa.Double(), nullable=True),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.Column("payload_sha256", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_ledger_calls"),
        sa.UniqueConstraint("run", "rollout_id", "position", name="uq_ledger_calls_position"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_ledger_calls_fence"
        ),
        sa.CheckConstraint("mode IN ('text', 'token_in')", name="ck_ledger_calls_mode"),
        sa.CheckConstraint("position >= 1", name="ck_ledger_calls_position"),
        sa.CheckConstraint("prev_len >= 0", name="ck_ledger_calls_prev_len"),
        sa.CheckConstraint("delta_len >= 0", name="ck_ledger_calls_delta_len"),
        sa.CheckConstraint("cum_len = prev_len + delta_len", name="ck_ledger_calls_cum_len"),
        sa.CheckConstraint("weight_version >= 0", name="ck_ledger_calls_weight_version"),
        sa.CheckConstraint("continuation_context_len >= 0", name="ck_ledger_calls_continuation_context_len"),
        sa.CheckConstraint("length(payload_sha256) = 64", name="ck_ledger_calls_payload_sha256"),
    )
    op.create_index(
        "ix_ledger_calls_continuation_fingerprint",
        "ledger_calls",
        ["run", "rollout_id", "continuation_fingerprint"],
    )
    op.create_table(
        "ledger_failures",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_ledger_failures"),
        sa.UniqueConstraint("run", "rollout_id", "position", name="uq_ledger_failures_position"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_ledger_failures_fence"
        ),
        sa.CheckConstraint("position >= 1", name="ck_ledger_failures_position"),
        sa.CheckConstraint("length(reason) >= 1", name="ck_ledger_failures_reason"),
    )
    op.create_table(
        "staged_calls",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("parent_call_id", sa.Text(), nullable=True),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("prev_len", sa.BigInteger(), nullable=False),
        sa.Column("delta_len", sa.BigInteger(), nullable=False),
        sa.Column("cum_len", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("extras_digest", sa.Text(), nullable=False),
        sa.Column("chain_hash", sa.Text(), nullable=False),
        sa.Column("cumulative_hash", sa.Text(), nullable=False),
        sa.Column("token_width", sa.SmallInteger(), nullable=False),
        sa.Column("staged_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("payload_sha256", sa.Text(), nullable=False),
        sa.Column("extras", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_staged_calls"),
        sa.CheckConstraint("mode IN ('text', 'token_in')", name="ck_staged_calls_mode"),
        sa.CheckConstraint("prev_len >= 0", name="ck_staged_calls_prev_len"),
        sa.CheckConstraint("delta_len >= 1", name="ck_staged_calls_delta_len"),
        sa.CheckConstraint("cum_len = prev_len + delta_len", name="ck_staged_calls_cum_len"),
        sa.CheckConstraint("weight_version >= 0", name="ck_staged_calls_weight_version"),
        sa.CheckConstraint("token_width IN (2, 4, 8)", name="ck_staged_calls_token_width"),
        sa.CheckConstraint("length(payload_sha256) = 64", name="ck_staged_calls_payload_sha256"),
    )
    op.create_table(
        "staged_attachments",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=True),
        sa.Column("shape", sa.Text(), nullable=True),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("data_sha256", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", "name", name="pk_staged_attachments"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id", "model_call_id"],
            ["staged_calls.run", "staged_calls.rollout_id", "staged_calls.model_call_id"],
            name="fk_staged_attachments_call",
        ),
        sa.CheckConstraint("kind IN ('bytes', 'text', 'json', 'buffer')", name="ck_staged_attachments_kind"),
        sa.CheckConstraint("(kind = 'buffer') = (dtype IS NOT NULL)", name="ck_staged_attachments_dtype"),
        sa.CheckConstraint("(kind = 'buffer') = (shape IS NOT NULL)", name="ck_staged_attachments_shape"),
        sa.CheckConstraint("length(data_sha256) = 64", name="ck_staged_attachments_data_sha256"),
    )
    op.bulk_insert(
        sa.table("wire_schema", sa.column("name", sa.Text()), sa.column("version", sa.BigInteger())),
        [
            {"name": "staging", "version": 2},
            {"name": "staging_digest", "version": 2},
            {"name": "staging_extras_digest", "version": 1},
            {"name": "staged_payload_codec", "version": 1},
        ],
    )


def downgrade() -> None:
    op.execute(
        "DELETE FROM wire_schema"
        " WHERE name IN ('staging', 'staging_digest', 'staging_extras_digest', 'staged_payload_codec')"
    )
    for table in ("staged_attachments", "staged_calls", "ledger_failures", "ledger_calls"):
        op.drop_table(table)
