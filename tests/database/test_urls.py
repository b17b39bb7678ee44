"""Which database URLs are accepted and how they are shown; what is malformed is refused before anything is opened."""

from __future__ import annotations

import socket

import pytest

from tokencustody.database import tcp
from tokencustody.database.connecting import connect
from tokencustody.database.url import parse_url
from tokencustody.errors import InvalidRecordError


@pytest.fixture(autouse=True)
def _no_settings_of_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "display"),
    [
        ("postgres://host/x", "postgresql://host:5432/x"),
        ("postgresql+asyncpg://me@host/x", "postgresql://me@host:5432/x"),
        ("postgresql://me:secret@[::1]:5433/x", "postgresql://me@[::1]:5433/x"),
        ("postgresql://me@[::1]:2,h1:1/x", "postgresql://me@[::1]:2,h1:1/x"),
        ("postgresql://me@/x?host=h1,h2&port=1,2", "postgresql://me@h1,h2:1,2/x"),
        ("postgresql:///x?host=/run/pg&port=5433", "postgresql://:5433/x?host=/run/pg"),
        ("postgresql://datenbank-älter/x", "postgresql://datenbank-älter:5432/x"),
        ("postgresql://h/x?connect_timeout=0&statement_cache_size=0", "postgresql://h:5432/x"),
    ],
)
def test_a_url_of_postgresql_is_shown_without_its_parameters(url: str, display: str) -> None:
    assert parse_url(url).display == display


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h:x/x",
        "postgresql://h:99999/x",
        "postgresql://h1:1,h2:x/x",
        "postgresql://h/x?port=x",
        "postgresql://h/x?port=1,99999",
        "postgresql://..:1/x",
        f"postgresql://{'h' * 64}/x",
        f"postgresql://h/x?host={'h' * 64}",
        "postgresql://h/x?connect_timeout=nan",
        "postgresql://h/x?connect_timeout=inf",
        "postgresql://h/x?connect_timeout=-1",
        "postgresql://h/x?statement_cache_size=-5",
        "postgresql://h/x?sslmode",
        "postgresql://[h/x",
        "postgresql://h/x#fragment",
    ],
)
def test_a_malformed_url_is_refused_with_the_form_of_a_good_one(url: str) -> None:
    with pytest.raises(InvalidRecordError, match="use postgresql://user@host:port/database"):
        parse_url(url)


def test_the_home_of_a_user_who_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRecordError, match="not known here"):
        parse_url("~no-such-user/captures.db")


@pytest.mark.parametrize("path", ["a:b.db", "a@b.db", "C:captures", "./postgresql.db", "run:1/captures.db"])
def test_a_path_may_hold_a_colon_or_an_at_sign(path: str) -> None:
    assert parse_url(path).dsn.endswith(path.removeprefix("./"))
    assert parse_url(f"sqlite:///me:x@{path}").is_sqlite


@pytest.mark.parametrize(
    "url",
    ["me:secret@host/x", "host=db password=secret dbname=x", "dbname=x user=me password = secret"],
)
def test_what_is_neither_a_url_nor_a_path_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidRecordError, match="neither a path nor a URL") as refused:
        parse_url(url)
    assert "secret" not in str(refused.value)


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(InvalidRecordError, match="no NUL"):
        parse_url("captures\0.db")


async def test_what_a_url_asks_of_its_sockets_is_set_on_them(postgres_url: str) -> None:
    asked = "keepalives_idle=41&keepalives_interval=7&keepalives_count=5&tcp_user_timeout=9000"
    assert await socket_options(f"{postgres_url}?{asked}") == [1, 41, 7, 5, 9000]


async def test_a_socket_is_watched_also_where_the_url_says_nothing(postgres_url: str) -> None:
    assert await socket_options(postgres_url, deadline=12) == [1, 30, 10, 3, 4000]
    assert await socket_options(postgres_url, deadline=600) == [1, 30, 10, 3, 10_000]


async def test_a_url_turns_off_what_watches_its_sockets(postgres_url: str) -> None:
    keepalives, *_, timeout = await socket_options(f"{postgres_url}?keepalives=0&tcp_user_timeout=0")
    assert (keepalives, timeout) == (0, 0)
    # 0 is the system's own.
    _, *_, timeout = await socket_options(f"{postgres_url}?keepalives_idle=0&tcp_user_timeout=1500")
    assert timeout == 1500


async def socket_options(url: str, deadline: float = 30) -> list[int]:
    connection = await connect(parse_url(url), deadline)
    try:
        watched = connection._transport.get_extra_info("socket")
        return [
            watched.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
            watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
            watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
            watched.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ]
    finally:
        await connection.close()


@pytest.mark.parametrize("name", tcp.PARAMETERS)
def test_a_socket_option_that_is_no_number_or_not_to_be_had_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("soon", "-1", "", "1.5", "2147483648", "\u0661"):
        with pytest.raises(InvalidRecordError, match=f"^{name} must be a whole number"):
            parse_url(f"postgresql://h/x?{name}={value}")
    if name != "keepalives":
        monkeypatch.setitem(tcp._NAMES, name, "TCP_OF_ANOTHER_SYSTEM")
        with pytest.raises(InvalidRecordError, match=f"no {name}; leave it out"):
            parse_url(f"postgresql://h/x?{name}=5")
