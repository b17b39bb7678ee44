"""The password file of libpq, read as libpq reads it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.support.postgres import Server, fetch
from tokencustody.database.pgpass import password_for
from tokencustody.database.url import parse_url
from tokencustody.errors import AccessDeniedError, StoreUnavailableError
from tokencustody.schema import migrate

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """A function that writes the file."""
    for name in ("PGPASSWORD", "PGHOST", "PGPORT", "PGDATABASE", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "pgpass"
    monkeypatch.setenv("PGPASSFILE", str(file))

    def write(text: str) -> Path:
        file.touch(0o600)
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize(
    ("line", "url", "password"),
    [
        ("host:5432:captures:me:plain", "postgresql://me@host/captures", "plain"),
        (r"host:5432:captures:me:a\:b\\c\d", "postgresql://me@host/captures", "a:b\\cd"),
        ("host:5432:captures:me:a:b", "postgresql://me@host/captures", "a:b"),
        ("host:5432:captures:me: spaces ", "postgresql://me@host/captures", " spaces "),
        ("host:5432:captures:me:windows\r", "postgresql://me@host/captures", "windows"),
        ("host:5432:captures:me:end\\", "postgresql://me@host/captures", "end\\"),
        ("*:*:*:*:any", "postgresql://me@host/captures", "any"),
        ("*:6543:*:*:port", "postgresql://me@host:6543/captures", "port"),
        ("*:6543:*:*:port", "postgresql://me@/captures?host=host&port=6543", "port"),
        ("*:6543:*:*:port", "postgresql://me@host/captures", None),
        (r"\:\:1:5432:*:me:six", "postgresql://me@[::1]/captures", "six"),
        (r"*:*:odd\:name:m\\e:odd", "postgresql://m%5Ce@host/odd%3Aname", "odd"),
        ("*:*:me:me:by its user's name", "postgresql://me@host", "by its user's name"),
        ("localhost:5432:captures:me:here", "postgresql://me@/captures", "here"),
        ("localhost:5432:captures:me:here", "postgresql://me@/captures?host=/var/run/postgresql", "here"),
        ("/sockets:5432:captures:me:there", "postgresql://me@/captures?host=/sockets", "there"),
        ("localhost:5432:captures:me:here", "postgresql://me@/captures?host=/sockets", None),
        ("# a:5432:*:*:x\n\nshort:line\n*:*:*:me:last", "postgresql://me@host/captures", "last"),
        ("host:*:*:me:first\nhost:*:*:me:second", "postgresql://me@host/captures", "first"),
        ("a:*:*:me:same\nb:*:*:me:same", "postgresql://me@a:1,b:2/captures", "same"),
        ("a:1:*:me:same\n*:2:*:me:same", "postgresql://me@/captures?host=a,b&port=1,2", "same"),
        ("*:*:*:*:file", "postgresql://me:given@host/captures", None),
    ],
)
def test_a_line_means_what_it_means_to_libpq(
    written: Written, line: str, url: str, password: str | None
) -> None:
    written(line)
    assert password_for(parse_url(url)) == password


@pytest.mark.parametrize("lines", ["a:*:*:me:s3cret\nb:*:*:me:other", "a:*:*:me:s3cret"])
def test_the_password_of_one_host_is_not_sent_to_another(written: Written, lines: str) -> None:
    written(lines)
    with pytest.raises(StoreUnavailableError, match="name one host") as refused:
        password_for(parse_url("postgresql://me@a,b/captures"))
    assert "s3cret" not in str(refused.value)


def test_a_file_that_others_may_read_is_none(written: Written) -> None:
    written("*:*:*:*:open").chmod(0o640)
    assert password_for(parse_url("postgresql://me@host/captures")) is None


def test_the_server_takes_a_password_with_every_escape(
    postgres: Server, postgres_url: str, written: Written
) -> None:
    parts = urlsplit(postgres_url)
    name, password = f"odd:{secrets.token_hex(4)}", r"a:b\c d "
    with ExitStack() as stack:
        fetch(postgres.url, f"CREATE ROLE \"{name}\" LOGIN PASSWORD '{password}'")
        stack.callback(fetch, postgres.url, f'DROP ROLE "{name}"')
        written(rf"{parts.hostname}:{parts.port}:*:{name}:".replace("odd:", r"odd\:") + r"a\:b\\c d " + "\n")
        url = f"postgresql://{quote(name)}@{parts.hostname}:{parts.port}{parts.path}"
        # Logged in, who may read nothing.
        with pytest.raises(AccessDeniedError):
            migrate.current(url)
