"""Calls whose prompt leaves out the sequence of their parent, and payloads that PostgreSQL does not compress.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.schema.tables` says later.

PostgreSQL adds the columns in place and writes no row again. SQLite copies `entries`, because it adds columns only at
the end, where reading one walks through the payload, and no constraints at all: until the copy is done, the file needs
room for the table twice. Calls that were stored before stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import context, op

from tokencustody.errors import SchemaMismatchError

revision = "0003_prefix_sharing"
down_revision: str | None = "0002_staging"
branch_labels: str | None = None
depends_on: str | None = None

# The columns of the older revision, and those that it knows.
KEPT = (
    "run, rollout_id, model_call_id, model, response_id, prompt_len, generation_len, cum_len, token_width, digest,"
    " parent_call_id, parent_resolution, parent_resolution_reason, prompt_is_delta, continuation_fingerprint,"
    " continuation_context_len, continuation_context_digest, fingerprint_version, created_at, committed_at, written_by,"
    " payload, payload_sha256"
)

CHECKS = {
    "ck_entries_shared_len": "shared_len >= 0",
    "ck_entries_shared_len_in_prompt": "shared_len <= prompt_len",
    "ck_entries_shared_has_parent": "shared_len = 0 OR parent_call_id IS NOT NULL",
    "ck_entries_shared_has_stored_sha256": "(shared_len = 0) = (stored_sha256 IS NULL)",
    "ck_entries_stored_sha256": "length(stored_sha256) = 64",
}

# What the server would compress, at several times the cost of storing it.
PACKED = {"entries": "payload", "staged_calls": "payload", "staged_attachments": "data"}


def upgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        checks = ", ".join(f"ADD CONSTRAINT {name} CHECK ({check})" for name, check in CHECKS.items())
        # One statement, which checks every constraint in one pass over the table.
        op.execute(
            "ALTER TABLE entries ADD COLUMN shared_len BIGINT DEFAULT 0 NOT NULL, ADD COLUMN stored_sha256 TEXT,"
            f" {checks}"
        )
        _set_storage("EXTERNAL")
    else:
        _copy_entries(
            [
                sa.Column("payload_sha256", sa.Text(), nullable=False),
                sa.Column("shared_len", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
                sa.Column("stored_sha256", sa.Text(), nullable=True),
                sa.Column("payload", sa.LargeBinary(), nullable=False),
            ],
            CHECKS,
        )
    op.execute("UPDATE wire_schema SET version = 2 WHERE name = 'payload_codec'")


def downgrade() -> None:
    # To base, every table goes, and no rollout is left that could look complete.
    if context.get_revision_argument() is not None:
        _refuse_to_lose_prompts()
    op.execute("UPDATE wire_schema SET version = 1 WHERE name = 'payload_codec'")
    if op.get_context().dialect.name == "postgresql":
        _set_storage("EXTENDED")
        # The constraints go with their columns.
        op.execute("ALTER TABLE entries DROP COLUMN shared_len, DROP COLUMN stored_sha256")
    else:
        _copy_entries(
            [
                sa.Column("payload", sa.LargeBinary(), nullable=False),
                sa.Column("payload_sha256", sa.Text(), nullable=False),
            ],
            {},
        )


def _set_storage(storage: str) -> None:
    for table, column in PACKED.items():
        op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE {storage}")


def _refuse_to_lose_prompts() -> None:
    shared = op.get_bind().scalar(sa.text("SELECT count(*) FROM entries WHERE shared_len > 0"))
    if shared:
        raise SchemaMismatchError(
            f"the prompts of {shared} calls are stored without the part that another call holds, which revision "
            f"{down_revision} cannot read: retire or delete their rollouts, then downgrade"
        )


def _copy_entries(last_columns: list[sa.Column[object]], checks: Mapping[str, str]) -> None:
    # Views of other people keep naming `entries`.
    op.execute("PRAGMA legacy_alter_table = ON")
    op.execute("ALTER TABLE entries RENAME TO entries_before")
    op.execute("PRAGMA legacy_alter_table = OFF")
    op.execute("DROP INDEX ix_entries_continuation_fingerprint")
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
        *last_columns,
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
        *(sa.CheckConstraint(check, name=name) for name, check in checks.items()),
    )
    op.execute(f"INSERT INTO entries ({KEPT}) SELECT {KEPT} FROM entries_before")  # noqa: S608 - constants
    op.execute("DROP TABLE entries_before")
    op.create_index(
        "ix_entries_continuation_fingerprint", "entries", ["run", "rollout_id", "continuation_fingerprint"]
    )
