"""${message}"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision: str | None = ${repr(down_revision)}
branch_labels: str | None = ${repr(branch_labels)}
depends_on: str | None = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}
    # If older libraries do not work with it, and nothing of the kind if they do: see `OLDEST` in `schema/revisions.py`.
    op.execute("UPDATE wire_schema SET version = ${up_revision[:4]} WHERE name = 'tables'")


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
