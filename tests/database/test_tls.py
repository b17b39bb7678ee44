"""TLS to PostgreSQL, tried on a server with certificates of its own: what is accepted, what is refused, and how."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.database.tls_server import PASSWORD, Stripper, TlsServer, tls_server
from tests.support.machine import needs_program
from tests.support.postgres import fetch
from tokencustody.database.tls import refusal
from tokencustody.database.url import parse_url
from tokencustody.errors import InvalidRecordError, StoreUnavailableError
from tokencustody.schema import migrate
from tokencustody.store import SqlTokenSink, open_store

# Long enough that a refusal which is tried again would be seen to be: `after N tries` is in the error then.
DEADLINE = 30.0
_ENCRYPTED = """
SELECT ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'tokencustody'
"""


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    needs_program("openssl", package="openssl")
    with tls_server(tmp_path_factory.mktemp("certificates")) as server:
        migrate.upgrade(server.url(sslmode="verify-full", sslrootcert=server.certificates.authority))
        yield server


@pytest.fixture(autouse=True)
def _no_settings_of_the_person(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def is_encrypted(url: str) -> bool:
    """Write and read through a store on `url`, and return whether the server saw TLS."""

    async def use() -> None:
        async with open_store(url, deadline=DEADLINE) as store:
            await store.sink.begin_call("rollout-1", "call-1")
            await store.source.freeze("rollout-1")
            await store.source.delete(["rollout-1"])
            seen.extend(row[0] for row in await asyncio.to_thread(fetch, url, _ENCRYPTED))

    seen: list[bool] = []
    asyncio.run(use())
    assert len(set(seen)) == 1
    return seen[0]


def refused(url: str) -> str:
    """Return the error of a store on `url`, which must come at once and without the password."""

    async def use() -> None:
        async with SqlTokenSink(url, deadline=DEADLINE) as sink:
            await sink.begin_call("rollout-1", "call-1")

    with pytest.raises(StoreUnavailableError) as caught:
        asyncio.run(use())
    said = str(caught.value)
    assert PASSWORD not in said
    assert "p%40ss" not in said
    return said


@pytest.mark.parametrize(
    ("sslmode", "encrypted"),
    [(None, True), ("disable", False), ("allow", False), ("prefer", True), ("require", True)],
)
def test_without_an_authority_the_mode_decides_whether_the_connection_is_encrypted(
    tls: TlsServer, sslmode: str | None, encrypted: bool
) -> None:
    query = {} if sslmode is None else {"sslmode": sslmode}
    assert is_encrypted(tls.url(**query)) is encrypted


@pytest.mark.parametrize("sslmode", ["require", "verify-ca", "verify-full"])
def test_a_server_with_a_certificate_of_the_named_authority_is_accepted(tls: TlsServer, sslmode: str) -> None:
    assert is_encrypted(tls.url(sslmode=sslmode, sslrootcert=tls.certificates.authority))


@pytest.mark.parametrize("sslmode", ["require", "verify-ca", "verify-full"])
def test_a_server_of_another_authority_is_refused_at_once(tls: TlsServer, sslmode: str) -> None:
    said = refused(tls.url(sslmode=sslmode, sslrootcert=tls.certificates.stranger))
    assert "certificate verify failed" in said
    assert "tries" not in said


def test_a_server_of_another_name_is_refused_at_once_by_verify_full_alone(tls: TlsServer) -> None:
    authority = tls.certificates.authority
    assert is_encrypted(tls.url(host="127.0.0.1", sslmode="verify-ca", sslrootcert=authority))
    said = refused(tls.url(host="127.0.0.1", sslmode="verify-full", sslrootcert=authority))
    assert "certificate is not valid for '127.0.0.1'" in said
    assert "tries" not in said


def test_a_server_that_wants_tls_refuses_a_plain_connection(tls: TlsServer) -> None:
    assert is_encrypted(tls.url(user="only_tls", sslmode="require"))
    said = refused(tls.url(user="only_tls", sslmode="disable"))
    assert 'user "only_tls"' in said
    assert "no encryption" in said
    assert "tries" not in said


def test_a_client_is_known_by_its_certificate(tls: TlsServer) -> None:
    certificate, key = tls.certificates.client
    proof = {"sslmode": "verify-full", "sslrootcert": tls.certificates.authority}
    assert is_encrypted(tls.url(user="certified", password=None, sslcert=certificate, sslkey=key, **proof))
    said = refused(tls.url(user="certified", password=None, **proof))
    assert "connection requires a valid client certificate" in said
    assert "tries" not in said


def test_a_client_certificate_of_another_authority_is_refused_with_the_servers_reason(tls: TlsServer) -> None:
    certificate, key = tls.certificates.strange_client
    url = tls.url(user="certified", password=None, sslmode="require", sslcert=certificate, sslkey=key)
    # The reason comes after the handshake; a connection that is closed before it is read is tried again.
    assert "unknown ca" in refused(url)


@pytest.mark.parametrize("sslmode", ["require", "verify-ca", "verify-full"])
def test_whoever_strips_tls_on_the_way_is_refused_and_learns_nothing(tls: TlsServer, sslmode: str) -> None:
    query = {"sslrootcert": tls.certificates.authority} if sslmode != "require" else {}
    with Stripper(tls.port) as stripper:
        said = refused(tls.url(host="127.0.0.1", port=stripper.port, sslmode=sslmode, **query))
    assert "rejected SSL upgrade" in said
    assert "tries" not in said
    assert stripper.refused == 1
    assert not stripper.overheard


def test_prefer_lets_tls_be_stripped_as_documented(tls: TlsServer) -> None:
    with Stripper(tls.port) as stripper:
        assert not is_encrypted(tls.url(host="127.0.0.1", port=stripper.port))
    assert b"tokencustody" in stripper.overheard


@pytest.mark.parametrize("parameter", ["sslrootcert", "sslcert", "sslkey", "sslcrl"])
def test_a_certificate_file_that_cannot_be_read_is_named_at_once(
    tls: TlsServer, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "nowhere.crt")
    query: dict[str, str | Path] = {"sslmode": "verify-full", "sslrootcert": tls.certificates.authority}
    said = refused(tls.url(**(query | {parameter: missing})))
    assert f"the file {missing} of {parameter} cannot be read: No such file" in said
    del query["sslrootcert"]
    monkeypatch.setenv(f"PG{parameter.upper()}", missing)
    assert f"the file {missing} of PG{parameter.upper()} cannot be read" in refused(tls.url(**query))


def test_a_file_that_is_no_certificate_or_no_key_of_it_is_refused_at_once(
    tls: TlsServer, tmp_path: Path
) -> None:
    (certificate, _), (_, other_key) = tls.certificates.client, tls.certificates.strange_client
    empty = tmp_path / "empty.crt"
    empty.touch()
    for query, reason in [
        ({"sslmode": "verify-full", "sslrootcert": empty}, "no certificate or crl found"),
        ({"sslmode": "require", "sslcert": certificate, "sslkey": other_key}, "key values mismatch"),
    ]:
        said = refused(tls.url(user="certified", password=None, **query))  # type: ignore[arg-type]
        assert reason in said
        assert "tries" not in said


def test_verifying_without_an_authority_is_refused_at_once(tls: TlsServer) -> None:
    said = refused(tls.url(sslmode="verify-full"))
    assert "root certificate file" in said
    assert "tries" not in said


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("PGSSLMODE", "verify-everything", "`sslmode` parameter must be one of"),
        ("PGSSLNEGOTIATION", "none", "`sslnegotiation` parameter must be one of"),
        ("PGSSLMINPROTOCOLVERSION", "TLSv9", "No such TLS version"),
    ],
)
def test_a_setting_of_the_environment_that_is_none_is_refused_at_once(
    tls: TlsServer, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert reason in refused(tls.url())


@pytest.mark.parametrize("query", ["sslmode=verify-everything", "sslmode=VERIFY-FULL", "sslrootcert=system"])
def test_a_parameter_of_the_url_that_is_none_is_refused_before_anything_is_opened(query: str) -> None:
    with pytest.raises(InvalidRecordError, match=query.partition("=")[0]):
        SqlTokenSink(f"postgresql://me:s3cret@localhost/x?{query}")


def test_the_environment_sets_what_the_url_leaves_open_and_the_url_wins(
    tls: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    monkeypatch.setenv("PGSSLROOTCERT", str(tls.certificates.stranger))
    assert "certificate verify failed" in refused(tls.url())
    assert not is_encrypted(tls.url(sslmode="disable"))
    assert is_encrypted(tls.url(sslrootcert=tls.certificates.authority))


def test_a_password_comes_from_the_environment_or_from_a_private_pgpass_file(
    tls: TlsServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = tls.url(password=None, sslmode="require")
    assert "password authentication failed" in refused(url)
    pgpass = tmp_path / ".pgpass"
    pgpass.touch(0o600)
    pgpass.write_text(f"localhost:{tls.port}:*:tokencustody:{PASSWORD}\n")
    assert is_encrypted(url)
    pgpass.unlink()
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert is_encrypted(url)


def test_commands_speak_tls_and_say_in_one_line_why_they_cannot(tls: TlsServer) -> None:
    good = tls.url(sslmode="verify-full", sslrootcert=tls.certificates.authority)
    wrong = tls.url(sslmode="verify-full", sslrootcert=tls.certificates.stranger)
    shown = parse_url(good).display
    done = {
        (name, url): subprocess.Popen(
            [sys.executable, "-m", "tokencustody", *name.split()],
            env=os.environ | {"TOKENCUSTODY_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("db upgrade", "rollouts")
        for url in (good, wrong)
    }
    for (_, url), process in done.items():
        out, err = process.communicate(timeout=60)
        if url == good:
            assert (process.returncode, err) == (0, "")
        else:
            assert (process.returncode, out) == (1, "")
            (line,) = err.splitlines()
            assert line.startswith(f"error: {shown} is not available: ")
            assert "certificate verify failed" in line


def test_a_connection_that_breaks_during_the_handshake_is_no_refusal() -> None:
    broken = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    assert refusal(broken) is None
    assert refusal(ConnectionResetError()) is None
    assert refusal(FileNotFoundError()) is None
    garbled = ConnectionError()
    garbled.__cause__ = ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] bad record mac")
    assert refusal(garbled) is None
