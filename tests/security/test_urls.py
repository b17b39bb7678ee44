"""Which database URLs are accepted and how they are shown; what is malformed is refused before anything is opened."""

from __future__ import annotations

import pytest

from tokencustody.errors import InvalidRecordError
from tokencustody.sql.url import parse_url


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
        ("postgresql://me@h1:1,[::1]:2/x", "postgresql://me@h1:1,[::1]:2/x"),
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
