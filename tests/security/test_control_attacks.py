"""Attacks on the control routes over real sockets: slow, many, malformed and cunning requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import random
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from tests.control.serving import (
    DELETE,
    PREFIX,
    RETIRE,
    TOKEN,
    RememberingLedger,
    exchange,
    manifest_path,
    serving,
)
from tokencustody.control import connections, make_control_app, routes
from tokencustody.database.stats import none_counted

BEARER = f"Authorization: Bearer {TOKEN}\r\n".encode()
# What a person would call for ever; the time-outs under test are far below.
PATIENCE = 300.0


def request(
    method: str, path: str, *headers: bytes, body: bytes = b"", token: bool = True, version: str = "1.1"
) -> bytes:
    head = f"{method} {path} HTTP/{version}\r\nHost: here\r\n".encode() + (BEARER if token else b"")
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + body


FIGURES = dict(none_counted(), transactions=7)
GOOD = request("GET", manifest_path("r"))


@pytest.fixture
def ledger() -> RememberingLedger:
    return RememberingLedger("held")


@pytest.fixture
def app(ledger: Any) -> Any:
    return make_control_app(ledger, auth_token=TOKEN, stats=lambda: FIGURES)


@pytest.fixture(autouse=True)
def _nothing_breaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A request is answered or cut off; it never is an error of the server, its loop or its protocol."""
    yield
    assert not [each for each in caplog.get_records("call") if each.levelno >= logging.ERROR]


class Connection:
    """A socket of the test, which reads answers one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def close_half(self) -> None:
        """Say that nothing more will be sent."""
        self._writer.write_eof()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Return the status and body of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await asyncio.wait_for(self.reader.readexactly(length), PATIENCE)

    async def is_cut_off(self) -> bool:
        """Wait until the server closes, whatever it sends before."""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), PATIENCE)
        return True

    async def is_cut_off_while_dripping(self, byte: bytes, every: float = 0.02) -> bool:
        """Send the byte again and again until the server closes."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    await self.send(byte)
                    try:
                        if not await asyncio.wait_for(self.reader.read(1), every):
                            return True
                    except TimeoutError:
                        continue
        return True


@contextlib.asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[Connection]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def assert_served(url: str) -> None:
    async with connected(url) as other:
        await other.send(GOOD)
        assert (await other.answer())[0] == 200


# Slow


@pytest.mark.parametrize(
    "first",
    [b"", b"GET / HTTP/1.1\r\nX: ", b"G"],
    ids=["silence", "half a header", "half a method"],
)
async def test_a_head_that_does_not_come_is_cut_off(
    app: Any, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with serving(app) as url, connected(url) as slow:
        await slow.send(first)
        await assert_served(url)
        assert await slow.is_cut_off()


async def test_a_head_that_drips_is_cut_off_while_others_are_served(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with serving(app) as url, connected(url) as slow:
        await slow.send(b"GET / HTTP/1.1\r\nX: ")
        dripping = asyncio.create_task(slow.is_cut_off_while_dripping(b"a"))
        await assert_served(url)
        assert await dripping


@pytest.mark.parametrize("token", [True, False])
async def test_a_second_head_that_drips_on_a_kept_connection_is_cut_off(
    app: Any, monkeypatch: pytest.MonkeyPatch, token: bool
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with serving(app) as url, connected(url) as slow:
        await slow.send(request("GET", manifest_path("r"), token=token))
        assert (await slow.answer())[0] == (200 if token else 401)
        assert await slow.is_cut_off_while_dripping(b"G")


async def test_a_body_that_drips_after_its_request_was_refused_is_cut_off(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with serving(app) as url, connected(url) as slow:
        await slow.send(request("POST", RETIRE, b"Content-Length: 99999999", token=False))
        assert (await slow.answer())[0] == 401
        assert await slow.is_cut_off_while_dripping(b"[")


async def test_a_body_that_drips_is_cut_off_while_others_are_served(
    app: Any, ledger: RememberingLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    async with serving(app) as url, connected(url) as slow:
        await slow.send(
            request("POST", RETIRE, b"Content-Type: application/json", b"Content-Length: 1000000")
        )
        dripping = asyncio.create_task(slow.is_cut_off_while_dripping(b" "))
        await assert_served(url)
        assert await dripping
    assert ledger.asked == ["r"]


async def test_a_client_that_takes_no_answers_is_cut_off(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.2)
    async with serving(app, send_buffer=4_096) as url:
        with socket.socket() as greedy:
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            greedy.setblocking(False)
            loop = asyncio.get_running_loop()
            host, port = url.removeprefix("http://").split(":")
            await loop.sock_connect(greedy, (host, int(port)))
            many = request("GET", "/training-token-capture/control/", token=False) * 1_000

            async def send_without_end() -> None:
                while True:
                    await loop.sock_sendall(greedy, many)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(send_without_end(), PATIENCE)
        await assert_served(url)


async def test_a_slow_answer_to_others_is_no_reason_to_cut_off_who_waits_for_it(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    answers = asyncio.Event()

    async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
        await answers.wait()
        await app(scope, receive, send)

    async with serving(slow_app) as url, connected(url) as patient, connected(url) as silent:
        await patient.send(GOOD)
        # It came after the other one's request and is cut off, so the other has waited longer than that.
        assert await silent.is_cut_off()
        answers.set()
        assert (await patient.answer())[0] == 200


# Many


async def test_many_silent_connections_take_no_place_from_a_request(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    async with serving(app) as url, contextlib.AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(url)) for _ in range(40)]
        await assert_served(url)
        closed = [each for each in silent[:33] if await each.is_cut_off()]
        assert len(closed) == 33
        # The newest seven are left, beside the request's place.
        assert not any(each.reader.at_eof() for each in silent[33:])


async def test_running_requests_are_never_given_up_for_new_connections(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    answers, running = asyncio.Event(), asyncio.Semaphore(0)

    async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
        running.release()
        await answers.wait()
        await app(scope, receive, send)

    async with serving(slow_app) as url, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(connected(url)) for _ in range(3)]
        for each in busy:
            await each.send(GOOD)
            await asyncio.wait_for(running.acquire(), PATIENCE)
        async with connected(url) as refused:
            assert await refused.is_cut_off()
        answers.set()
        assert [(await each.answer())[0] for each in busy] == [200] * 3
        await assert_served(url)


# Malformed

MALFORMED = {
    "two lengths": request("POST", RETIRE, b"Content-Length: 5", b"Content-Length: 6") + b"hello",
    "a length of another script": request("POST", RETIRE, "Content-Length: ٣".encode()),
    "a signed length": request("POST", RETIRE, b"Content-Length: +5"),
    "a negative length": request("POST", RETIRE, b"Content-Length: -5"),
    "a hexadecimal length": request("POST", RETIRE, b"Content-Length: 0x5"),
    "a length without end": request("POST", RETIRE, b"Content-Length: " + b"9" * 5_000),
    "a coding of its own": request("POST", RETIRE, b"Transfer-Encoding: gzip, chunked"),
    "no chunk size": request("POST", RETIRE, b"Transfer-Encoding: chunked") + b"zz\r\n",
    "a chunk size without end": request("POST", RETIRE, b"Transfer-Encoding: chunked") + b"f" * 100 + b"\r\n",
    "a NUL in the target": request("GET", "/\0"),
    "a NUL in a header": request("GET", "/", b"X: \0"),
    "a line break in a header": request("GET", "/", b"X: a\rb"),
    "a header without a colon": request("GET", "/", b"nonsense"),
    "a space before the colon": request("GET", "/", b"X : a"),
    "two hosts": request("GET", "/", b"Host: there"),
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "HTTP 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP 0.9": b"GET /\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "a method with a slash": request("GE/T", "/"),
    "an unencoded path": request("GET", "/é"),
    "a URL that is too long": request("GET", "/" + "a" * 1_000_000),
    "a header that is too long": request("GET", "/", b"X: " + b"a" * 1_000_000),
    "too many headers": request("GET", "/", *[b"X: a"] * 200_000),
}


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
async def test_what_is_no_http_is_400_and_closed(app: Any, ledger: RememberingLedger, raw: bytes) -> None:
    async with serving(app) as url:
        async with connected(url) as bad:
            with contextlib.suppress(ConnectionError):
                await bad.send(raw)
            try:
                answer = await asyncio.wait_for(bad.reader.read(), PATIENCE)
            except ConnectionError:
                answer = b""  # reset while the rest of it was still on its way
        await assert_served(url)
    assert answer == b"" or answer.split()[1] == b"400"
    assert TOKEN.encode() not in answer
    assert ledger.asked == ["r"]


async def test_a_bad_chunk_after_the_refusal_closes_the_connection(app: Any) -> None:
    async with serving(app) as url, connected(url) as bad:
        await bad.send(request("POST", RETIRE, b"Transfer-Encoding: chunked", token=False))
        assert (await bad.answer())[0] == 401
        await bad.send(b"zz\r\n")
        assert await bad.is_cut_off()


async def test_a_length_beside_chunks_is_refused_and_the_connection_closed(
    app: Any, ledger: RememberingLedger
) -> None:
    chunked = request(
        "POST",
        RETIRE,
        b"Content-Type: application/json",
        b"Content-Length: 5",
        b"Transfer-Encoding: chunked",
    )
    hidden = request("POST", DELETE, body=b'{"rollout_ids": ["held"]}')
    async with serving(app) as url:
        answer = await exchange(url, chunked + b"0\r\n\r\n" + hidden)
    assert answer.split()[1] == b"400"
    assert answer.count(b"HTTP/1.1") == 1
    assert ledger.asked == []


async def test_no_mutation_of_a_good_request_is_an_error_of_the_server(app: Any) -> None:
    rng = random.Random(7)
    body = b'{"rollout_ids": ["held", "other"]}'
    seeds = [
        GOOD,
        request("POST", RETIRE, body=body),
        request("POST", DELETE, b"Content-Type: application/json", b"Transfer-Encoding: chunked")
        + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        request("GET", "/healthz", token=False),
        request("GET", "/metrics"),
    ]
    alphabet = [b"\0", b"\r", b"\n", b"\r\n", b" ", b":", b"%", b"/", b"\xff", b"0", b"9" * 30, b"HTTP/1.1"]
    async with serving(app) as url:

        async def attack(raw: bytes) -> bytes:
            async with connected(url) as bad:
                with contextlib.suppress(ConnectionError):
                    await bad.send(raw)
                    bad.close_half()
                try:
                    return await asyncio.wait_for(bad.reader.read(), PATIENCE)
                except ConnectionError:
                    return b""

        for _ in range(15):
            mutants = []
            for _ in range(20):
                raw = bytearray(rng.choice(seeds))
                for _ in range(rng.randint(1, 4)):
                    at = rng.randrange(len(raw))
                    raw[at : at + rng.randint(0, 3)] = rng.choice([*alphabet, rng.randbytes(2)])
                mutants.append(attack(bytes(raw) + rng.choice([b"", GOOD])))
            for answer in await asyncio.gather(*mutants):
                statuses = [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
                assert set(statuses) <= {b"200", b"400", b"401", b"404", b"405", b"408", b"413", b"422"}
        await assert_served(url)


BODIES = {
    "a key given twice": b'{"rollout_ids": ["held"], "rollout_ids": ["other"]}',
    "a key given twice in another spelling": b'{"rollout_ids": ["held"], "rollout\\u005fids": ["other"]}',
    "NaN": b'{"rollout_ids": [NaN]}',
    "infinity": b'{"rollout_ids": [-Infinity]}',
    "a number without end": b'{"rollout_ids": [' + b"9" * 100_000 + b"]}",
    "deep objects": b'{"rollout_ids": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deep in a key given twice": b'{"rollout_ids": ' + b"[" * 900 + b"]" * 900 + b',"rollout_ids": ["held"]}',
    "a byte order mark": b'\xef\xbb\xbf{"rollout_ids": ["held"]}',
    "UTF-16": '{"rollout_ids": ["held"]}'.encode("utf-16"),
    "100,000 ids": json.dumps({"rollout_ids": ["a"] * 100_000}).encode(),
    "a comment": b'{"rollout_ids": ["held"] /* all */}',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_body_that_is_not_one_list_of_ids_is_422(
    app: Any, ledger: RememberingLedger, body: bytes
) -> None:
    async with serving(app) as url, connected(url) as client:
        await client.send(request("POST", DELETE, body=body))
        status, detail = await client.answer()
        assert (status, b"rollout_ids" in detail) == (422, True)
        assert len(detail) < 1_000
    assert ledger.asked == []


async def test_100000_long_ids_are_413_before_they_are_sent(app: Any, ledger: RememberingLedger) -> None:
    body = json.dumps({"rollout_ids": [f"rollout-{number:020d}" for number in range(100_000)]}).encode()
    async with serving(app) as url, connected(url) as client:
        await client.send(request("POST", DELETE, body=body).removesuffix(body))
        assert (await client.answer())[0] == 413
    assert ledger.asked == []


# Cunning

ELSEWHERE = [
    PREFIX + "/../../healthz",
    PREFIX + "/%2e%2e/%2e%2e/healthz",
    "/healthz/.." + manifest_path("r"),
    "/healthz/",
    "/" + manifest_path("r"),
    "/." + manifest_path("r"),
    manifest_path("r").replace("/control/", "%2fcontrol%2f"),
    manifest_path("r").replace("/control/", "/%63ontrol/"),
    manifest_path("r").replace("/control/", "/%2563ontrol/"),
    manifest_path("r").replace("/control/", "//control/"),
    manifest_path("r").upper(),
    manifest_path("r") + "/",
    manifest_path("r") + "%00",
    manifest_path("r") + "?token=" + TOKEN,
    manifest_path("r") + "?access_token=" + TOKEN,
    manifest_path("%u0072"),
    manifest_path("%EF%BC%92"),
    "http://here" + manifest_path("r"),
    "*",
    "/metrics",
    "/metrics/",
    "//metrics",
    "/%6detrics",
    "/metrics?token=" + TOKEN,
    "/docs",
    "/openapi.json",
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "X"])
async def test_nothing_but_health_is_reached_without_the_token(
    app: Any, ledger: RememberingLedger, method: str
) -> None:
    async with serving(app) as url:
        for path in ELSEWHERE:
            raw = request(
                method,
                path,
                f"Cookie: token={TOKEN}".encode(),
                f"X-Authorization: Bearer {TOKEN}".encode(),
                f"Proxy-Authorization: Bearer {TOKEN}".encode(),
                b"X-Original-URL: /healthz",
                b"X-HTTP-Method-Override: GET",
                b"Connection: close",
                token=False,
            )
            answer = await exchange(url, raw)
            assert answer.split()[1] in (b"401", b"404"), path
            assert TOKEN.encode() not in answer, path
    assert ledger.asked == []


@pytest.mark.parametrize("path", [manifest_path("r"), RETIRE, "/metrics", "/healthz"])
@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get"])
async def test_a_method_that_a_route_does_not_have_is_405_and_echoes_nothing(
    app: Any, ledger: RememberingLedger, method: str, path: str
) -> None:
    async with serving(app) as url:
        answer = await exchange(url, request(method, path, b"Connection: close"))
    assert answer.split()[1] == b"405"
    assert b"\r\nallow: " in answer.lower()
    assert TOKEN.encode() not in answer
    assert ledger.asked == []


async def test_the_token_is_compared_in_constant_time(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(given: bytes, wanted: bytes) -> bool:
        compared.append((given, wanted))
        return real(given, wanted)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    async with serving(app) as url:
        for path in (manifest_path("r"), RETIRE, "/metrics"):
            await exchange(
                url, request("GET", path, b"Authorization: Basic x", b"Connection: close", token=False)
            )
    assert compared == [(b"x", TOKEN.encode())] * 3


async def test_a_request_does_not_inherit_the_token_of_the_one_before(
    app: Any, ledger: RememberingLedger
) -> None:
    async with serving(app) as url, connected(url) as client:
        await client.send(GOOD + request("GET", manifest_path("r"), token=False) + GOOD)
        assert [(await client.answer())[0] for _ in range(3)] == [200, 401, 200]
    assert ledger.asked == ["r", "r"]


async def test_a_connection_serves_on_after_every_kind_of_error(app: Any) -> None:
    async with serving(app) as url, connected(url) as client:
        for raw, status in [
            (request("GET", manifest_path("r"), token=False), 401),
            (request("GET", manifest_path("a%20b")), 400),
            (request("GET", PREFIX + "/x"), 404),
            (request("POST", RETIRE, body=b"{}"), 422),
            (request("PUT", RETIRE, body=b"{}"), 405),
            (request("POST", RETIRE, token=False, body=b"{}"), 401),
            (request("POST", RETIRE, body=b'{"rollout_ids": ["held"]}'), 200),
        ]:
            await client.send(raw)
            assert (await client.answer())[0] == status


async def test_http_1_0_is_answered_and_closed(app: Any) -> None:
    async with serving(app) as url:
        answer = await exchange(url, request("GET", manifest_path("r"), version="1.0"))
        bare = await exchange(url, b"GET /healthz HTTP/1.0\r\n\r\n")
    assert answer.split()[1] == bare.split()[1] == b"200"


async def test_a_client_that_closes_its_half_breaks_nothing(app: Any) -> None:
    async with serving(app) as url:
        for raw in (GOOD, GOOD[:-2], request("POST", RETIRE, b"Content-Length: 10")):
            async with connected(url) as half:
                await half.send(raw)
                half.close_half()
                assert await half.is_cut_off()
        await assert_served(url)


async def test_metrics_are_for_whoever_has_the_token(app: Any) -> None:
    async with serving(app) as url, connected(url) as client:
        await client.send(request("GET", "/metrics", token=False))
        assert (await client.answer())[0] == 401
        await client.send(request("GET", "/metrics"))
        status, text = await client.answer()
    assert status == 200
    assert b"\ntokencustody_transactions_total 7\n" in text
