"""Reading manifests and letting rollouts go over HTTP: the routes, their server, and the trainer's client.

Needs the extra `http`; importing this package without it raises ImportError.
"""

from __future__ import annotations

try:
    from tokencustody.control.client import RolloutControlClient
    from tokencustody.control.routes import RefuseRemoval, install_rollout_control_routes
    from tokencustody.control.server import make_control_app
except ModuleNotFoundError as exc:
    if (exc.name or "").partition(".")[0] == "tokencustody":
        raise
    raise ImportError(
        f"tokencustody.control needs {exc.name}: run pip install 'tokencustody[http]'", name=exc.name
    ) from exc

from tokencustody.control.errors import (
    ControlAuthError,
    ControlError,
    MalformedAnswerError,
    RemovalRefusedError,
)
from tokencustody.control.wire import CONTROL_ROUTE_PREFIX, MAX_ROLLOUTS_PER_REQUEST

__all__ = [
    "CONTROL_ROUTE_PREFIX",
    "MAX_ROLLOUTS_PER_REQUEST",
    "ControlAuthError",
    "ControlError",
    "MalformedAnswerError",
    "RefuseRemoval",
    "RemovalRefusedError",
    "RolloutControlClient",
    "install_rollout_control_routes",
    "make_control_app",
]
