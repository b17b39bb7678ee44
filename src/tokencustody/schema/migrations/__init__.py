"""The Alembic environment and the released revisions. `tokencustody.schema.migrate` runs them."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.config import Config


def configuration(output_buffer: io.StringIO | None = None) -> Config:
    """Return Alembic's configuration for this environment."""
    from alembic.config import Config

    config = Config(output_buffer=output_buffer)
    config.set_main_option("script_location", "tokencustody.schema:migrations")
    return config


@cache
def prepare() -> None:
    """Import what running the revisions needs, so that nothing is imported on the way of the first call."""
    from alembic import command  # noqa: F401 - it is what runs them
    from alembic.script import ScriptDirectory

    # Each revision imports modules of its own.
    for _ in ScriptDirectory.from_config(configuration()).walk_revisions():
        pass
