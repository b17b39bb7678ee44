"""A PostgreSQL server that speaks TLS, with an authority and certificates made for the test run."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from tests.support.postgres import ROUTES, Server, fetch, postgres_server

PASSWORD = "p@ss/w%rd"  # noqa: S105

# Whoever has a certificate, whoever speaks TLS, and everybody, in this order.
_HBA = """
local   all all               scram-sha-256
hostssl all certified all     cert
hostssl all all       all     scram-sha-256
host    all plain     all     scram-sha-256
host    all tokencustody all  scram-sha-256
"""

_EXTENSIONS = """
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = CA:FALSE
subjectAltName = DNS:localhost
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
[client]
basicConstraints = CA:FALSE
extendedKeyUsage = clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


class Certificates:
    """An authority, a server's certificate for `localhost`, a client's for the role `certified`, and a stranger."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "extensions").write_text(_EXTENSIONS)
        self.authority = self._authority("authority")
        self.stranger = self._authority("stranger")
        self.server = self._issue("server", "localhost", "authority")
        self.client = self._issue("client", "certified", "authority")
        self.strange_client = self._issue("client", "certified", "stranger")

    def _authority(self, name: str) -> Path:
        self._openssl("req", "-x509", *self._key(name), "-subj", f"/CN={name}", "-days", "2",
                      "-config", self._config(), "-extensions", "authority", "-out", f"{name}.crt")  # fmt: skip
        return self._folder / f"{name}.crt"

    def _issue(self, kind: str, common_name: str, authority: str) -> tuple[Path, Path]:
        name = f"{kind}-of-{authority}"
        self._openssl("req", "-new", *self._key(name), "-subj", f"/CN={common_name}",
                      "-config", self._config(), "-out", f"{name}.csr")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt", "-CAkey", f"{authority}.key",
                      "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-extensions", kind,
                      "-out", f"{name}.crt")  # fmt: skip
        return self._folder / f"{name}.crt", self._folder / f"{name}.key"

    def _key(self, name: str) -> list[str]:
        return [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            f"{name}.key",
        ]

    def _config(self) -> str:
        (self._folder / "config").write_text("[req]\ndistinguished_name=name\n[name]\n" + _EXTENSIONS)
        return "config"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


@dataclass(frozen=True)
class TlsServer:
    """The server and what proves it."""

    server: Server
    certificates: Certificates
    port: int

    def url(self, database: str = "postgres", *, user: str = "tokencustody", host: str = "localhost",
            port: int | None = None, password: str | None = PASSWORD, **query: str | Path) -> str:  # fmt: skip
        """Return a URL with these parameters."""
        secret = "" if password is None else f":{quote(password, safe='')}"
        parameters = urlencode({name: str(value) for name, value in query.items()})
        return f"postgresql://{user}{secret}@{host}:{port or self.port}/{database}" + (
            f"?{parameters}" if parameters else ""
        )


@contextmanager
def tls_server(folder: Path) -> Iterator[TlsServer]:
    """Bring up a server of PostgreSQL's own programs and switch TLS on."""
    certificates = Certificates(folder)
    with postgres_server({route: ROUTES[route] for route in ("programs", "wheel")}) as server:
        assert server.socket_directory is not None
        data = server.socket_directory / "data"
        owner = data.stat()
        for source, name in zip(
            (certificates.authority, *certificates.server),
            ("ca.crt", "server.crt", "server.key"),
            strict=True,
        ):
            target = data / name
            target.touch(0o600)
            target.write_bytes(source.read_bytes())
            os.chown(target, owner.st_uid, owner.st_gid)
        (data / "pg_hba.conf").write_text(_HBA)
        for statement in (
            "ALTER SYSTEM SET ssl_ca_file = 'ca.crt'",
            "ALTER SYSTEM SET ssl = on",
            f"CREATE ROLE only_tls LOGIN SUPERUSER PASSWORD '{PASSWORD}'",
            "CREATE ROLE certified LOGIN SUPERUSER",
            "SELECT pg_reload_conf()",
        ):
            fetch(server.url, statement)
        deadline = time.monotonic() + 10
        while fetch(server.url, "SHOW ssl")[0][0] != "on":
            assert time.monotonic() < deadline
        # Last, because the URL that the server came with has the password that this replaces.
        fetch(server.url, f"ALTER ROLE tokencustody PASSWORD '{PASSWORD}'")
        port = urlsplit(server.url).port
        assert port is not None
        yield TlsServer(server, certificates, port)


class Stripper:
    """A man in the middle that answers every wish for TLS with no, and passes everything else on in plain."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refused = 0
        self.overheard = bytearray()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Stripper:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            first = client.recv(8, socket.MSG_WAITALL)
            if first == b"\0\0\0\x08\x04\xd2\x16\x2f":
                self.refused += 1
                client.sendall(b"N")
                first = b""
            with socket.create_connection(self._target) as server:
                server.sendall(first)
                back = threading.Thread(target=_pump, args=(server, client, bytearray()), daemon=True)
                back.start()
                _pump(client, server, self.overheard)
                back.join(10)


def _pump(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    try:
        while data := source.recv(65_536):
            seen += data
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass
