"""Database URLs: what is accepted, and what of them may be shown.

A PostgreSQL URL means what it means to libpq; asyncpg reads it. What it does not say comes from the environment:
PGHOST, PGPORT, PGUSER, PGDATABASE, PGPASSWORD, PGPASSFILE (or ~/.pgpass, which only its owner may read),
PGSERVICEFILE, PGSSLMODE, PGSSLROOTCERT, PGSSLCERT, PGSSLKEY, PGSSLCRL, PGSSLMINPROTOCOLVERSION,
PGSSLMAXPROTOCOLVERSION, PGSSLNEGOTIATION and PGTARGETSESSIONATTRS. The URL wins over the environment.

TLS parameters are `sslmode`, `sslrootcert`, `sslcert`, `sslkey`, `sslpassword`, `sslcrl`, `sslnegotiation`,
`ssl_min_protocol_version` and `ssl_max_protocol_version`; the files of ~/.postgresql are read as libpq reads them.
Without sslmode it is `prefer`, which takes a plain connection from whoever offers no TLS and proves nothing; `require`
encrypts, `verify-ca` also checks the server's certificate and `verify-full` its name. `sslrootcert=system` is not known
to asyncpg: name the file of the system's authorities.

`keepalives`, `keepalives_idle`, `keepalives_interval`, `keepalives_count` and `tcp_user_timeout` are libpq's, with its
units; without them a connection that is idle is probed after 30 s, then every 10 s, and given up after 3 probes, and
what is not acknowledged within a third of the deadline, 10 s at most, is given up too. `statement_cache_size=0` says
that the server is a pooler in transaction mode, which is found out anyway.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from tokencustody.database.tcp import PARAMETERS, TcpOptions
from tokencustody.errors import InvalidRecordError

_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
# A URL of a server that lost a part of its beginning, with a user and a password in it, or libpq's other form.
_NO_PATH = re.compile(
    r"(postgres|postgresql(\+asyncpg)?):|.*:.*@|(.*\s)?(host|hostaddr|port|dbname|user|password)\s*=",
    re.DOTALL,
)


@dataclass(frozen=True)
class DatabaseUrl:
    """A parsed database URL. Its repr and `display` never contain the password.

    `dsn` is what the driver connects to: a libpq-style URL, or the absolute path of a SQLite file.
    `statement_cache_size` is 0 where the URL says that it leads to a pooler in transaction mode.
    """

    dialect: str
    dsn: str = field(repr=False)
    display: str
    connect_timeout: float | None = None
    statement_cache_size: int | None = None
    tcp: TcpOptions = field(default_factory=TcpOptions)

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is a SQLite file."""
        return self.dialect == "sqlite"


def parse_url(url: str | os.PathLike[str]) -> DatabaseUrl:
    """Return the parsed form of `sqlite:///…`, `sqlite+aiosqlite:///…`, a path, `postgres[ql]://…` or
    `postgresql+asyncpg://…`, the latter with libpq's usual query parameters.

    Raises InvalidRecordError (a ValueError) for anything else.
    """
    if not isinstance(url, str):
        url = os.fspath(url)
    if not url.strip():
        raise InvalidRecordError(
            "the URL is empty and names no database: give captures.db, sqlite:///captures.db or "
            "postgresql://user@host/database, to a command as --url or in TOKENCUSTODY_URL"
        )
    scheme, separator, rest = url.partition("://")
    if not separator:
        if _NO_PATH.match(url):
            raise InvalidRecordError(
                "this is neither a path nor a URL; write postgresql://user@host/database, or sqlite:///file for a path "
                "with :, @ or = in it"
            )
        return _sqlite(url)
    if scheme in ("sqlite", "sqlite+aiosqlite"):
        if not rest.startswith("/"):
            raise InvalidRecordError(
                "a SQLite URL is sqlite:///relative/path.db or sqlite:////absolute/path.db"
            )
        if "?" in rest:
            raise InvalidRecordError("a SQLite URL takes no query parameters")
        return _sqlite(rest[1:])
    if scheme in ("postgres", "postgresql", "postgresql+asyncpg"):
        return _postgresql(f"postgresql://{rest}")
    shown = repr(scheme) if scheme.replace("+", "").isalnum() else "before ://"
    raise InvalidRecordError(
        f"the URL scheme {shown} is not supported; use sqlite:///captures.db, a path, or postgresql://user@host/database"
    )


def _sqlite(path: str) -> DatabaseUrl:
    if not path or ":memory:" in path:
        raise InvalidRecordError("custody needs a SQLite file that outlives the process: give a path")
    if "\0" in path:
        raise InvalidRecordError("the path of a SQLite file has no NUL")
    # Resolved now, because a worker may change its directory before it first connects.
    try:
        absolute = str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise InvalidRecordError(f"{path!r} begins with the home of a user who is not known here") from None
    return DatabaseUrl("sqlite", absolute, f"sqlite:///{absolute}")


def _postgresql(url: str) -> DatabaseUrl:
    read = None
    with contextlib.suppress(ValueError):
        read = _read_postgresql(url)
    if read is None:
        # Not from the parser's own error, which may quote the part that holds the password.
        raise InvalidRecordError(
            "the PostgreSQL URL is malformed; use postgresql://user@host:port/database?sslmode=… and write "
            "/ ? # @ in a password as %2F %3F %23 %40"
        )
    parts, query, port, connect_timeout, statement_cache_size = read
    tcp = TcpOptions.of({name: query.pop(name) for name in PARAMETERS if name in query})
    if query.get("sslmode", "prefer") not in _SSL_MODES:
        raise InvalidRecordError(f"sslmode must be one of {', '.join(_SSL_MODES)}")
    if query.get("sslrootcert") == "system":
        raise InvalidRecordError(
            "sslrootcert=system is not supported; name a file of certificate authorities"
        )
    userinfo, _, hostport = parts.netloc.rpartition("@")
    dsn = f"postgresql://{parts.netloc}{parts.path}" + (
        f"?{urlencode(query, quote_via=quote)}" if query else ""
    )
    host = (
        query.get("host")
        or hostport.removesuffix(f":{port}" if port else "")
        or os.environ.get("PGHOST")
        or "localhost"
    )
    database = (
        unquote(parts.path.lstrip("/"))
        or query.get("dbname")
        or query.get("database")
        or os.environ.get("PGDATABASE", "")
    )
    shown_port = query.get("port") or (str(port) if port else os.environ.get("PGPORT", "5432"))
    user = unquote(userinfo.partition(":")[0]) or query.get("user", "")
    location = f"host={host}" if host.startswith("/") else ""
    place = "" if location else host
    if "," not in parts.netloc:  # several hosts have their ports beside them
        place += f":{shown_port}"
    display = f"postgresql://{user + '@' if user else ''}{place}/{database}"
    return DatabaseUrl(
        "postgresql",
        dsn,
        display + (f"?{location}" if location else ""),
        connect_timeout,
        statement_cache_size,
        tcp,
    )


def _read_postgresql(url: str) -> tuple[SplitResult, dict[str, str], int | None, float | None, int | None]:
    """Return the parts of a URL, its parameters, and those of them that are numbers. ValueError if one is malformed."""
    parts = urlsplit(url)
    if parts.fragment or "@" in parts.path + parts.query or parts.netloc.count("@") > 1:
        raise ValueError  # a password with one of / ? # @ that is not percent-encoded
    query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    places = [urlsplit(f"//{place}") for place in parts.netloc.rpartition("@")[2].split(",")]
    ports = [place.port for place in places]
    port = ports[0] if len(ports) == 1 else None
    for host in [*(place.hostname or "" for place in places), *query.get("host", "").split(",")]:
        if not host.startswith("/"):
            host.encode("idna")
    for each in query.get("port", "").split(","):
        if each and not 0 <= int(each) <= 65_535:
            raise ValueError
    connect_timeout = float(query.pop("connect_timeout")) if "connect_timeout" in query else None
    cache = query.pop("statement_cache_size", query.pop("prepared_statement_cache_size", None))
    statement_cache_size = None if cache is None else int(cache)
    if not 0 <= (connect_timeout or 0) < math.inf or (statement_cache_size or 0) < 0:
        raise ValueError
    return parts, query, port, connect_timeout, statement_cache_size
