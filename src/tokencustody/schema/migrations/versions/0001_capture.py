"""Fences, entries, intents, failures, the history of versions, and the wire schemas.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.schema.tables` says later.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001_capture"
down_revision: str | None = None
branch_labels: str | None = None
depends_on: str | None = None


def upgrade() -> None:
    op.create_table(
        "fences",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=True),
        sa.Column("incomplete", sa.Boolean(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("frozen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("run", "rollout_id", name="pk_fences"),
        sa.CheckConstraint("state IN ('open', 'frozen', 'retired')", name="ck_fences_state"),
        sa.CheckConstraint("version >= 0", name="ck_fences_version"),
        sa.CheckConstraint(
            "state <> 'frozen' OR snapshot_id IS NOT NULL", name="ck_fences_frozen_has_snapshot"
        ),
    )
    op.create_table(
        "entries",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("response_id", sa.Text(), nullable=True),
        sa.Column("prompt_len", sa.BigInteger(), nullable=False),
        sa.Column("generation_len", sa.BigInteger(), nullable=False),
        sa.Column("cum_len", sa.BigInteger(), nullable=True),
        sa.Column("token_width", sa.SmallInteger(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("parent_call_id", sa.Text(), nullable=True),
        sa.Column("parent_resolution", sa.Text(), nullable=True),
        sa.Column("parent_resolution_reason", sa.Text(), nullable=False),
        sa.Column("prompt_is_delta", sa.Boolean(), nullable=False),
        sa.Column("continuation_fingerprint", sa.Text(), nullable=False),
        sa.Column("continuation_context_len", sa.BigInteger(), nullable=False),
        sa.Column("continuation_context_digest", sa.Text(), nullable=False),
        sa.Column("fingerprint_version", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=True),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("payload_sha256", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_entries"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_entries_fence"
        ),
        sa.CheckConstraint("prompt_len >= 0", name="ck_entries_prompt_len"),
        sa.CheckConstraint("generation_len >= 0", name="ck_entries_generation_len"),
        sa.CheckConstraint("cum_len >= 0", name="ck_entries_cum_len"),
        sa.CheckConstraint("continuation_context_len >= 0", name="ck_entries_continuation_context_len"),
        sa.CheckConstraint("token_width IN (2, 4, 8)", name="ck_entries_token_width"),
        sa.CheckConstraint(
            "parent_resolution IN ('root', 'resolved', 'unresolved')", name="ck_entries_parent_resolution"
        ),
        sa.CheckConstraint("length(payload_sha256) = 64", name="ck_entries_payload_sha256"),
    )
    op.create_index(
        "ix_entries_continuation_fingerprint", "entries", ["run", "rollout_id", "continuation_fingerprint"]
    )
    op.create_table(
        "intents",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("refusal_code", sa.Text(), nullable=True),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("refused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_intents"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_intents_fence"
        ),
        sa.CheckConstraint("(refusal_code IS NULL) = (refused_at IS NULL)", name="ck_intents_refusal"),
    )
    op.create_table(
        "failures",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("first_payload_sha256", sa.Text(), nullable=True),
        sa.Column("second_payload_sha256", sa.Text(), nullable=True),
        sa.Column("differing_fields", sa.Text(), nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "version", name="pk_failures"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_failures_fence"
        ),
        sa.CheckConstraint("kind IN ('mark', 'conflict', 'refusal_conflict')", name="ck_failures_kind"),
        sa.CheckConstraint("version >= 1", name="ck_failures_version"),
    )
    op.create_table(
        "snapshot_versions",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("model_call_id", sa.Text(), nullable=False),
        sa.Column("snapshot_id", sa.Text(), nullable=True),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("written_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "rollout_id", "version", name="pk_snapshot_versions"),
        sa.UniqueConstraint("run", "rollout_id", "event_id", name="uq_snapshot_versions_event_id"),
        sa.ForeignKeyConstraint(
            ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name="fk_snapshot_versions_fence"
        ),
        sa.CheckConstraint(
            "event IN ('open', 'conflict', 'mark', 'refusal', 'freeze', 'drop', 'retire')",
            name="ck_snapshot_versions_event",
        ),
        sa.CheckConstraint("version >= 0", name="ck_snapshot_versions_version"),
    )
    wire_schema = op.create_table(
        "wire_schema",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_wire_schema"),
        sa.CheckConstraint("version >= 1", name="ck_wire_schema_version"),
    )
    op.bulk_insert(
        wire_schema,
        [
            {"name": "token_entry", "version": 1},
            {"name": "token_digest", "version": 1},
            {"name": "fingerprint", "version": 2},
            {"name": "payload_codec", "version": 1},
        ],
    )


def downgrade() -> None:
    op.drop_table("wire_schema")
    op.drop_table("snapshot_versions")
    op.drop_table("failures")
    op.drop_table("intents")
    op.drop_index("ix_entries_continuation_fingerprint", table_name="entries")
    op.drop_table("entries")
    op.drop_table("fences")
