"""Passwords from a file of libpq's, read as libpq reads it.

asyncpg reads the file too, but leaves the backslashes of an escaped \\: or \\\\ in, takes spaces from the end of a
password, and sends the password of one host to every other of the URL.
"""

from __future__ import annotations

import getpass
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from tokencustody.database.url import DatabaseUrl
from tokencustody.errors import StoreUnavailableError

# Where libpq looks for a server on this host, which it calls localhost.
_SOCKET_FOLDERS = ("/run/postgresql", "/var/run/postgresql", "/tmp")  # noqa: S108 - a place, not a file made there


def password_for(url: DatabaseUrl) -> str | None:
    """Return the password that PGPASSFILE or ~/.pgpass has for a URL, where neither it nor the environment has one.

    A file that others may read is none. Raises StoreUnavailableError where the hosts of the URL have several passwords.
    """
    parts = urlsplit(url.dsn)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    userinfo, _, places = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    if (
        password
        or "password" in query
        or "PGPASSWORD" in os.environ
        or "service" in query
        or "PGSERVICE" in os.environ
    ):
        return None
    lines = list(_lines(query.get("passfile") or os.environ.get("PGPASSFILE")))
    if not lines:
        return None
    user = unquote(user) or query.get("user") or os.environ.get("PGUSER") or getpass.getuser()
    database = unquote(parts.path.lstrip("/")) or query.get("dbname") or query.get("database")
    database = database or os.environ.get("PGDATABASE") or user
    found = {
        next((line[4] for line in lines if _matches(line, host, port, database, user)), None)
        for host, port in _places(places, query)
    }
    if len(found) > 1:
        raise StoreUnavailableError(
            f"{url.display}: its hosts have several passwords in the password file, or only some have one, and one "
            "connection can have but one: give them the same, or name one host"
        )
    return found.pop()


def _places(places: str, query: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each host of a URL with its port."""
    hosts = (query.get("host") or "").split(",") if query.get("host") else []
    ports = (query.get("port") or os.environ.get("PGPORT") or "5432").split(",")
    if not hosts and places:
        read = [urlsplit(f"//{place}") for place in places.split(",")]
        hosts = [unquote(place.hostname or "") for place in read]
        ports = [str(place.port or ports[0]) for place in read]
    if not hosts:
        hosts = (os.environ.get("PGHOST") or "").split(",")
    for number, host in enumerate(hosts):
        yield host or "localhost", ports[number] if len(ports) == len(hosts) else ports[0]


def _matches(line: list[str], host: str, port: str, database: str, user: str) -> bool:
    names = {host, "localhost"} if host in _SOCKET_FOLDERS else {host}
    return line[0] in {"*", *names} and all(
        held in ("*", wanted) for held, wanted in zip(line[1:4], (port, database, user), strict=True)
    )


def _lines(named: str | None) -> Iterator[list[str]]:
    """Yield the five fields of each line of the file."""
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        file = Path(named) if named else Path.home() / ".pgpass"
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return
        for line in file.read_text("utf-8").split("\n"):
            fields = _fields(line.rstrip("\r"))
            if not line.startswith("#") and len(fields) == 5:
                yield fields


def _fields(line: str) -> list[str]:
    """Split a line at its first four colons that no backslash stands before, and take the backslashes away."""
    fields = [""]
    characters = iter(line)
    for character in characters:
        if character == ":" and len(fields) < 5:
            fields.append("")
        else:
            fields[-1] += next(characters, "\\") if character == "\\" else character
    return fields
