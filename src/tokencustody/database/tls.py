"""TLS to PostgreSQL: which failures are refusals that asking again will not change, and what is wrong in words."""

from __future__ import annotations

import os
import ssl
from urllib.parse import parse_qs, urlsplit

from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import StoreUnavailableError

# The parameter of the URL and the variable that stands for it.
_FILES = {"sslrootcert": "PGSSLROOTCERT", "sslcert": "PGSSLCERT", "sslkey": "PGSSLKEY", "sslcrl": "PGSSLCRL"}
# asyncpg has no class of its own for this.
_NO_TLS = "rejected SSL upgrade"
# What a connection raises that breaks during the handshake, as when the server restarts.
_BROKEN = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def check_files(url: DatabaseUrl) -> None:
    """Raise StoreUnavailableError if a certificate or key file of the URL or environment cannot be read, naming it.

    The driver's own error names none, and is that of a socket that is not there yet.
    """
    query = parse_qs(urlsplit(url.dsn).query)
    for parameter, variable in _FILES.items():
        path = query.get(parameter, [os.environ.get(variable, "")])[-1]
        if not path:
            continue
        try:
            with open(path, "rb"):  # noqa: PTH123 - the path as the driver takes it
                pass
        except OSError as exc:
            origin = parameter if parameter in query else variable
            raise StoreUnavailableError(
                f"{url.display} is not available: the file {path} of {origin} cannot be read: {exc.strerror}"
            ) from None


def is_of_asyncpg(exc: BaseException, *names: str) -> bool:
    """Return whether `exc` is one of these errors of asyncpg, which a process that uses SQLite does not import."""
    return any(
        each.__name__ in names and each.__module__.startswith("asyncpg.") for each in type(exc).__mro__
    )


def refusal(exc: BaseException) -> BaseException | None:
    """Return the error by which one side refused the other's TLS, or the parameters of the connection made no sense."""
    cause: BaseException | None = exc
    while cause is not None:
        if is_of_asyncpg(cause, "ClientConfigurationError"):
            return cause
        if type(cause) is ConnectionError and _NO_TLS in str(cause):
            return cause
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, _BROKEN):
            # The server's refusal of a client certificate comes as an alert, after the handshake; whatever else
            # happens then broke a connection that was good.
            return cause if cause is exc or "ALERT" in str(cause) else None
        cause = cause.__cause__ or cause.__context__
    return None
