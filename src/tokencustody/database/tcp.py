"""The TCP socket of a connection to PostgreSQL, so that a peer that is gone without a word is noticed in time.

The options mean what libpq's parameters of the same names mean; asyncpg has none of them.
"""

from __future__ import annotations

import asyncio
import re
import socket
from dataclasses import dataclass

from tokencustody.errors import InvalidRecordError

# What setsockopt calls them; macOS has another word for the first, and none for the last.
_IDLE = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
_NAMES = {
    "keepalives_idle": _IDLE,
    "keepalives_interval": "TCP_KEEPINTVL",
    "keepalives_count": "TCP_KEEPCNT",
    "tcp_user_timeout": "TCP_USER_TIMEOUT",
}
# Firewalls and balancers forget a connection that is idle, most after minutes.
_DEFAULTS = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
PARAMETERS = ("keepalives", *_NAMES)
_MOST = 2**31 - 1


@dataclass(frozen=True)
class TcpOptions:
    """What a URL asks of its sockets. `values` has its numbers by parameter, 0 for the system's own."""

    keepalives: bool = True
    values: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, asked: dict[str, str]) -> TcpOptions:
        """Return the options that a URL's parameters ask for. Raises InvalidRecordError that names a bad one."""
        numbers = {}
        for name, value in asked.items():
            if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) > _MOST:
                raise InvalidRecordError(f"{name} must be a whole number of 0 to {_MOST}")
            numbers[name] = int(value)
        keepalives = bool(numbers.pop("keepalives", 1))
        for name, number in numbers.items():
            if number and not hasattr(socket, _NAMES[name]):
                raise InvalidRecordError(f"this system has no {name}; leave it out of the URL")
        return cls(keepalives, tuple(sorted(numbers.items())))


def tune(transport: asyncio.BaseTransport, options: TcpOptions, patience: float) -> None:
    """Set the options of a connection's socket. What was sent is given up unacknowledged after `patience` seconds.

    A Unix socket has none.
    """
    connected = transport.get_extra_info("socket")
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(options.keepalives))
    values = _DEFAULTS | {"tcp_user_timeout": max(1000, round(1000 * patience))} | dict(options.values)
    for name, value in values.items():
        if value and (options.keepalives or name == "tcp_user_timeout") and hasattr(socket, _NAMES[name]):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, _NAMES[name]), value)
