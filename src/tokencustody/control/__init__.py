"""Reading manifests and letting rollouts go over HTTP: the routes, their server, and the trainer's client.

Needs the extra `http`; asking this package for a name without it raises ImportError.
"""

from typing import TYPE_CHECKING, Any

from tokencustody.lazy import names

if TYPE_CHECKING:
    from tokencustody.control.client import RolloutControlClient
    from tokencustody.control.errors import (
        ControlAuthError,
        ControlError,
        MalformedAnswerError,
        RemovalRefusedError,
    )
    from tokencustody.control.routes import RefuseRemoval, install_rollout_control_routes
    from tokencustody.control.server import make_control_app
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

_named = names(
    __name__,
    CONTROL_ROUTE_PREFIX="control.wire",
    MAX_ROLLOUTS_PER_REQUEST="control.wire",
    ControlAuthError="control.errors",
    ControlError="control.errors",
    MalformedAnswerError="control.errors",
    RefuseRemoval="control.routes",
    RemovalRefusedError="control.errors",
    RolloutControlClient="control.client",
    install_rollout_control_routes="control.routes",
    make_control_app="control.server",
)


def __getattr__(name: str) -> Any:
    try:
        return _named(name)
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "tokencustody":
            raise
        raise ImportError(without_extra(exc), name=exc.name) from exc


def without_extra(exc: ModuleNotFoundError) -> str:
    """Return what to say where a module of the extra is not installed."""
    return f"tokencustody.control needs {exc.name}: run pip install 'tokencustody[http]'"
