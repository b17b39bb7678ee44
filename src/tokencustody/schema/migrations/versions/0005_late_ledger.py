"""Ledger rows behind a freeze: their event, a seal that covers them, several reasons for one failed call; the parent
fingerprint that the store derives beside the one that a record claims; refusals without a code; marks of exports that
say whether the files hold everything; and on PostgreSQL views whose wording a dump and its restore keep.

Names and types are written out: this file keeps saying what it said when it was released, whatever
`tokencustody.schema.tables` says later.

SQLite changes no constraint in place, so it copies three tables, none of which holds tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import context, op

from tokencustody.errors import SchemaMismatchError
from tokencustody.schema.migrations import view_privileges, views_0004, views_0005, wording_0005

revision = "0005_late_ledger"
down_revision: str | None = "0004_audit"
branch_labels: str | None = None
depends_on: str | None = None

EVENTS = ("open", "conflict", "mark", "refusal", "freeze", "drop", "retire")
LATE_EVENTS = ("late_ledger", "late_stage")
REFUSAL = "refusal_code IS NULL OR refused_at IS NOT NULL"
REFUSAL_BEFORE = "(refusal_code IS NULL) = (refused_at IS NULL)"

# What the record said, where the columns without `recorded_` hold what the store derived. Older rows have none: theirs
# hold what their record said.
RECORDED = {"recorded_fingerprint": "TEXT", "recorded_fingerprint_version": "BIGINT"}

# By what a request is known that continues the second payload of a conflict, which is no parent and makes others
# ambiguous.
SECOND = {
    "second_fingerprint": "TEXT",
    "second_fingerprint_version": "BIGINT",
    "second_context_len": "BIGINT",
    "second_context_digest": "TEXT",
}

# Which attachments a call was staged with. What was staged before says nothing.
ATTACHED = "CONSTRAINT ck_staged_calls_attachments_sha256 CHECK (length(attachments_sha256) = 64)"

# Rows of which the older revision can make nothing, or what it would misread, and why.
LATE = {
    "snapshot_versions": ("event LIKE 'late_%'", "versions are of rows that came after a freeze"),
    "intents": ("refused_at IS NOT NULL AND refusal_code IS NULL", "refusals have no code"),
    "ledger_failures": (
        "EXISTS (SELECT 1 FROM ledger_failures AS other WHERE other.run = ledger_failures.run"
        " AND other.rollout_id = ledger_failures.rollout_id AND other.model_call_id = ledger_failures.model_call_id"
        " AND other.position < ledger_failures.position)",
        "failed calls have more than one reason",
    ),
}


def upgrade() -> None:
    for column, kind in RECORDED.items():
        op.execute(f"ALTER TABLE ledger_calls ADD COLUMN {column} {kind}")
    for column, kind in SECOND.items():
        op.execute(f"ALTER TABLE failures ADD COLUMN {column} {kind}")
    op.execute(f"ALTER TABLE staged_calls ADD COLUMN attachments_sha256 TEXT {ATTACHED}")
    # Older exports held rollouts in part too, and their marks do not say which.
    op.execute("ALTER TABLE exports ADD COLUMN is_held BOOLEAN")
    if op.get_context().dialect.name == "postgresql":
        op.execute("ALTER TABLE snapshot_versions ADD COLUMN seal_version BIGINT")
        _set_constraints((*EVENTS, *LATE_EVENTS), REFUSAL)
        op.execute(
            "ALTER TABLE ledger_failures DROP CONSTRAINT uq_ledger_failures_position,"
            " DROP CONSTRAINT pk_ledger_failures,"
            " ADD CONSTRAINT pk_ledger_failures PRIMARY KEY (run, rollout_id, position)"
        )
        # All of them: what their comments say of those that were dumped and restored tells nothing.
        for statement in views_0005.views("postgresql").values():
            op.execute(statement.replace("CREATE VIEW", "CREATE OR REPLACE VIEW", 1))
        op.execute(wording_0005.settle(views_0005.views("postgresql")))
    else:
        _copy_snapshot_versions(
            (*EVENTS, *LATE_EVENTS), [sa.Column("seal_version", sa.BigInteger(), nullable=True)]
        )
        _copy_intents(REFUSAL)
        _copy_ledger_failures(
            [sa.PrimaryKeyConstraint("run", "rollout_id", "position", name="pk_ledger_failures")]
        )
        for name in views_0005.changed():
            op.execute(f"DROP VIEW {name}")
            op.execute(views_0005.views("sqlite")[name])
    op.create_index(
        "ix_ledger_failures_model_call_id", "ledger_failures", ["run", "rollout_id", "model_call_id"]
    )


def downgrade() -> None:
    # To base, every table goes.
    to_base = context.get_revision_argument() is None
    if not to_base:
        _refuse_to_lose_rows()
    dialect = op.get_context().dialect.name
    keeps = dialect == "postgresql" and not to_base
    kept = view_privileges.keep(op.get_bind(), views_0005.changed()) if keeps else []
    # The older revision proves neither seals nor rows that cover more than it knows.
    op.execute("UPDATE snapshot_versions SET sealed_sha256 = NULL WHERE seal_version > 1")
    op.execute(
        "UPDATE ledger_calls SET continuation_fingerprint = recorded_fingerprint,"
        " fingerprint_version = recorded_fingerprint_version, row_sha256 = NULL"
        " WHERE recorded_fingerprint_version IS NOT NULL"
    )
    for name in views_0005.changed():
        op.execute(f"DROP VIEW {name}")
    for column in RECORDED:
        op.execute(f"ALTER TABLE ledger_calls DROP COLUMN {column}")
    for column in SECOND:
        op.execute(f"ALTER TABLE failures DROP COLUMN {column}")
    op.execute("ALTER TABLE staged_calls DROP COLUMN attachments_sha256")
    op.execute("ALTER TABLE exports DROP COLUMN is_held")
    op.drop_index("ix_ledger_failures_model_call_id", "ledger_failures")
    if dialect == "postgresql":
        op.execute("ALTER TABLE snapshot_versions DROP COLUMN seal_version")
        _set_constraints(EVENTS, REFUSAL_BEFORE)
        op.execute(
            "ALTER TABLE ledger_failures DROP CONSTRAINT pk_ledger_failures,"
            " ADD CONSTRAINT pk_ledger_failures PRIMARY KEY (run, rollout_id, model_call_id),"
            " ADD CONSTRAINT uq_ledger_failures_position UNIQUE (run, rollout_id, position)"
        )
    else:
        _copy_snapshot_versions(EVENTS, [])
        _copy_intents(REFUSAL_BEFORE)
        _copy_ledger_failures(
            [
                sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_ledger_failures"),
                sa.UniqueConstraint("run", "rollout_id", "position", name="uq_ledger_failures_position"),
            ]
        )
    for name in views_0005.changed():
        op.execute(views_0004.views(dialect)[name])
    if dialect == "postgresql":
        op.execute(views_0004.KEEP_DEFINITIONS)
    if kept:
        view_privileges.give_back(op.get_bind(), kept)


def _refuse_to_lose_rows() -> None:
    for table, (condition, what) in LATE.items():
        found = op.get_bind().scalar(sa.text(f"SELECT count(*) FROM {table} WHERE {condition}"))  # noqa: S608 - constants
        if found:
            raise SchemaMismatchError(
                f"{found} {what}, which revision {down_revision} cannot hold: delete their rollouts, then downgrade"
            )


def _set_constraints(events: Sequence[str], refusal: str) -> None:
    event = f"event IN ({', '.join(map(repr, events))})"
    for table, constraint, definition in (
        ("snapshot_versions", "ck_snapshot_versions_event", f"CHECK ({event})"),
        ("intents", "ck_intents_refusal", f"CHECK ({refusal})"),
    ):
        op.execute(
            f"ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} {definition}"
        )


def _copy_snapshot_versions(events: Sequence[str], added: Sequence[sa.Column[object]]) -> None:
    _copy(
        "snapshot_versions",
        [
            *_rollout_key(),
            sa.Column("version", sa.BigInteger(), nullable=False),
            sa.Column("event", sa.Text(), nullable=False),
            sa.Column("event_id", sa.Text(), nullable=False),
            sa.Column("model_call_id", sa.Text(), nullable=False),
            sa.Column("snapshot_id", sa.Text(), nullable=True),
            sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
            sa.Column("written_by", sa.Text(), nullable=False),
            sa.Column(
                "sealed_sha256",
                sa.Text(),
                sa.CheckConstraint("length(sealed_sha256) = 64", name="ck_snapshot_versions_sealed_sha256"),
                nullable=True,
            ),
        ],
        [
            sa.PrimaryKeyConstraint("run", "rollout_id", "version", name="pk_snapshot_versions"),
            sa.UniqueConstraint("run", "rollout_id", "event_id", name="uq_snapshot_versions_event_id"),
            sa.CheckConstraint(
                f"event IN ({', '.join(map(repr, events))})", name="ck_snapshot_versions_event"
            ),
            sa.CheckConstraint("version >= 0", name="ck_snapshot_versions_version"),
        ],
        added,
    )


def _copy_intents(refusal: str) -> None:
    _copy(
        "intents",
        [
            *_rollout_key(),
            sa.Column("model_call_id", sa.Text(), nullable=False),
            sa.Column("refusal_code", sa.Text(), nullable=True),
            sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
            sa.Column("refused_at", sa.DateTime(timezone=True), nullable=True),
            sa.Column("written_by", sa.Text(), nullable=False),
        ],
        [
            sa.PrimaryKeyConstraint("run", "rollout_id", "model_call_id", name="pk_intents"),
            sa.CheckConstraint(refusal, name="ck_intents_refusal"),
        ],
    )


def _copy_ledger_failures(keys: Sequence[sa.Constraint]) -> None:
    _copy(
        "ledger_failures",
        [
            *_rollout_key(),
            sa.Column("model_call_id", sa.Text(), nullable=False),
            sa.Column("position", sa.BigInteger(), nullable=False),
            sa.Column("reason", sa.Text(), nullable=False),
            sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False),
            sa.Column("written_by", sa.Text(), nullable=False),
            sa.Column(
                "row_sha256",
                sa.Text(),
                sa.CheckConstraint("length(row_sha256) = 64", name="ck_ledger_failures_row_sha256"),
                nullable=True,
            ),
        ],
        [
            *keys,
            sa.CheckConstraint("position >= 1", name="ck_ledger_failures_position"),
            sa.CheckConstraint("length(reason) >= 1", name="ck_ledger_failures_reason"),
        ],
    )


def _rollout_key() -> list[sa.Column[object]]:
    return [sa.Column("run", sa.Text(), nullable=False), sa.Column("rollout_id", sa.Text(), nullable=False)]


# A constraint stands in its column where revision 0004 put it, which drops the two together.
def _copy(
    table: str,
    columns: Sequence[sa.Column[object]],
    constraints: Sequence[sa.Constraint],
    added: Sequence[sa.Column[object]] = (),
) -> None:
    """Make a table anew with the rows that it holds. Views keep naming it."""
    op.execute("PRAGMA legacy_alter_table = ON")
    op.execute(f"ALTER TABLE {table} RENAME TO {table}_before")
    op.execute("PRAGMA legacy_alter_table = OFF")
    fence = sa.ForeignKeyConstraint(
        ["run", "rollout_id"], ["fences.run", "fences.rollout_id"], name=f"fk_{table}_fence"
    )
    op.create_table(table, *columns, *added, fence, *constraints)
    names = ", ".join(column.name for column in columns)
    op.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM {table}_before")  # noqa: S608 - constants
    op.execute(f"DROP TABLE {table}_before")
