"""The trainer's client: against real servers on both databases, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.control.serving import TOKEN, RememberingLedger, serving
from tests.support.ledger import make_commit
from tokencustody.control import (
    ControlAuthError,
    ControlError,
    MalformedAnswerError,
    RemovalRefusedError,
    RolloutControlClient,
    install_rollout_control_routes,
)
from tokencustody.errors import InvalidRecordError, RolloutRetiredError, StoreUnavailableError
from tokencustody.staging.records import RolloutManifest, RolloutRemoval
from tokencustody.store import SqlLineageStore

URL = "http://control.test"
EMPTY = {"schema_version": 2, "rollout_id": "r", "records": [], "failures": []}


@asynccontextmanager
async def control(ledger: Any, token: str = TOKEN, **options: Any) -> AsyncIterator[RolloutControlClient]:
    """Serve the routes of a ledger on a real socket, and yield a client of them."""
    app = FastAPI()
    install_rollout_control_routes(app, ledger, auth_token=TOKEN, **options)
    async with serving(app) as url, RolloutControlClient(url, token) as client:
        yield client


class Answers(httpx.AsyncBaseTransport):
    """A server that gives one answer to everything, and remembers the requests."""

    def __init__(
        self, answer: httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]
    ) -> None:
        self.answer = answer
        self.requests: list[httpx.Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, httpx.Response):
            return httpx.Response(
                self.answer.status_code, headers=self.answer.headers, content=self.answer.content
            )
        return self.answer(request)

    def client(self) -> RolloutControlClient:
        return RolloutControlClient(URL, TOKEN, transport=self)


def saying(status: int, detail: Any) -> Answers:
    return Answers(httpx.Response(status, json={"detail": detail}))


async def test_a_manifest_arrives_in_commit_order_with_every_field(ledger: SqlLineageStore) -> None:
    commits = [make_commit(model_call_id=f"call-{number}") for number in (3, 1, 2)]
    for commit in commits:
        await ledger.record(commit)
    await ledger.record_failure("rollout-1", "call-4", "worker_capture_failed")
    async with control(ledger) as client:
        manifest = await client.manifest("rollout-1")
        unknown = await client.manifest("never-seen")
    assert manifest.records == [commit.record for commit in commits]
    assert [(each.model_call_id, each.reason) for each in manifest.failures] == [
        ("call-4", "worker_capture_failed")
    ]
    assert unknown == RolloutManifest(rollout_id="never-seen")


async def test_removals_answer_in_input_order_with_each_rollout_once(ledger: SqlLineageStore) -> None:
    for rollout_id in ("a", "b", "c"):
        await ledger.record(make_commit(rollout_id))
    async with control(ledger) as client:
        retired = await client.retire(["x", "c", "a", "c", "w", "x"])
        again = await client.retire(("a", "c"))
        with pytest.raises(
            RolloutRetiredError, match=r"manifest of rollout a at http.* 410, rollout a is retired"
        ):
            await client.manifest("a")
        deleted = await client.delete(["c", "b", "a"])
        unused = await client.manifest("a")
    assert retired == RolloutRemoval(removed=["c", "a"], absent=["x", "w"])
    assert again == RolloutRemoval(absent=["a", "c"])
    assert deleted == RolloutRemoval(removed=["b"], absent=["c", "a"])
    assert unused.records == []


@pytest.mark.parametrize("rollout_id", [".", "..", "...", "a..b", "-", "manifest", "retire", "x" * 255])
async def test_every_valid_id_reaches_the_server_as_it_is(rollout_id: str) -> None:
    ledger = RememberingLedger()
    async with control(ledger) as client:
        assert (await client.manifest(rollout_id)).rollout_id == rollout_id
    assert ledger.asked == [rollout_id]


async def test_a_large_batch_is_split_and_merged_in_input_order() -> None:
    ids = [f"rollout-{number}" for number in range(5_000)]
    held = ids[7::3]
    ledger = RememberingLedger(*held)
    async with control(ledger) as client:
        done = await client.delete([*ids, *ids[:100]])
    assert ledger.asked == [ids[:4_096], ids[4_096:]]
    assert done.removed == held
    assert done.absent == [each for each in ids if each not in set(held)]


async def test_of_a_large_batch_the_rollouts_that_had_records_are_found(ledger: SqlLineageStore) -> None:
    ids = [f"rollout-{number}" for number in range(300)]
    await ledger.record(make_commit(ids[299]))
    async with control(ledger) as client:
        done = await client.delete(ids)
    assert (done.removed, done.absent) == ([ids[299]], ids[:299])


@pytest.mark.parametrize(
    ("batch", "kind", "said"),
    [
        ("rollout-1", TypeError, "not str"),
        (b"rollout-1", TypeError, "not bytes"),
        (None, TypeError, "not NoneType"),
        ({"rollout-1"}, TypeError, "not set"),
        (iter(["rollout-1"]), TypeError, "sequence of ids"),
        (["ok"] * 5_000 + ["a b"], ValueError, r"rollout_ids\[5000\] 'a b'"),
        (["ok", ""], ValueError, r"rollout_ids\[1\] ''"),
        (["ok", "../x"], ValueError, "'../x'"),
        (["ok", "é"], ValueError, "'é'"),
        (["ok", 7], ValueError, r"rollout_ids\[1\] must be a string, not int"),
    ],
)
async def test_a_batch_is_checked_whole_before_the_first_request(
    batch: Any, kind: type[Exception], said: str
) -> None:
    server = saying(500, "reached")
    async with server.client() as client:
        for remove in (client.retire, client.delete):
            with pytest.raises(kind, match=said):
                await remove(batch)
    assert server.requests == []


async def test_no_ids_and_a_bad_id_make_no_request() -> None:
    server = saying(500, "reached")
    async with server.client() as client:
        assert await client.retire([]) == await client.delete(()) == RolloutRemoval()
        for bad in ("", "a/b", "..\\", "x" * 256, None):
            with pytest.raises(InvalidRecordError, match="rollout_id"):
                await client.manifest(bad)  # type: ignore[arg-type]
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRecordError),
        (401, ControlAuthError),
        (403, ControlAuthError),
        (404, ControlError),
        (405, ControlError),
        (408, ControlError),
        (409, RemovalRefusedError),
        (410, RolloutRetiredError),
        (413, InvalidRecordError),
        (422, InvalidRecordError),
        (429, ControlError),
        (500, ControlError),
        (502, StoreUnavailableError),
        (503, StoreUnavailableError),
        (504, StoreUnavailableError),
        (201, ControlError),
        (204, ControlError),
    ],
)
async def test_each_status_has_its_error_with_the_rollout_and_what_the_server_said(
    status: int, kind: type[Exception]
) -> None:
    server = saying(status, "because\nof this")
    async with server.client() as client:
        with pytest.raises(kind) as reading:
            await client.manifest("rollout-1")
        with pytest.raises(kind) as removing:
            await client.retire(["rollout-1", "rollout-2"])
    assert type(reading.value) is type(removing.value) is kind
    assert str(reading.value) == (
        f"reading the manifest of rollout rollout-1 at {URL}: {status}, because of this"
    )
    assert str(removing.value) == (
        f"asking to retire rollout rollout-1 and 1 more at {URL}: {status}, because of this"
    )
    # Nothing is repeated.
    assert len(server.requests) == 2


async def test_a_wrong_token_is_told_from_a_refused_removal_on_a_real_server() -> None:
    ledger = RememberingLedger("a")
    async with control(ledger, token="another") as client:
        with pytest.raises(ControlAuthError, match="401"):
            await client.retire(["a"])
    async with control(ledger, refuse_removal=lambda ids: f"{ids[0]} is running") as client:
        with pytest.raises(RemovalRefusedError, match="409, a is running"):
            await client.retire(["a"])
    assert ledger.held == {"a"}


async def test_a_removal_may_take_longer_the_more_rollouts_it_names() -> None:
    server = Answers(httpx.ReadTimeout("late"))
    async with RolloutControlClient(URL, TOKEN, timeout=7, transport=server) as client:
        with pytest.raises(StoreUnavailableError, match="no answer within 57 seconds"):
            await client.retire([f"r-{number}" for number in range(1_000)])
    waits = server.requests[0].extensions["timeout"]
    assert waits == {"connect": 7, "write": 7, "pool": 7, "read": 57}


async def test_when_a_later_request_of_a_batch_fails_the_error_says_what_was_done() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        ids = json.loads(request.content)["rollout_ids"]
        if ids[0] != "r-0":
            return httpx.Response(503, json={"detail": "busy"})
        return httpx.Response(200, json={"removed": ids, "absent": []})

    server = Answers(answer)
    async with server.client() as client:
        with pytest.raises(
            StoreUnavailableError,
            match=r"delete rollout r-4096 and 903 more \(the 4,096 before them are done\)",
        ):
            await client.delete([f"r-{number}" for number in range(5_000)])
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"null",
        b"[]",
        b"{}",
        json.dumps(EMPTY | {"rollout_id": "other"}).encode(),
        json.dumps(EMPTY | {"rollout_id": 7}).encode(),
        json.dumps(EMPTY | {"records": None}).encode(),
        json.dumps(EMPTY | {"records": [{"model_call_id": "call-1"}]}).encode(),
        json.dumps(EMPTY | {"unknown": 1}).encode(),
        json.dumps(EMPTY | {"schema_version": 3}).encode(),
        json.dumps(EMPTY).encode()[:-1],
    ],
)
async def test_an_answer_that_is_not_this_rollouts_manifest_is_refused(content: bytes) -> None:
    async with Answers(httpx.Response(200, content=content)).client() as client:
        with pytest.raises(MalformedAnswerError, match="manifest of rollout r at"):
            await client.manifest("r")


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        b"{}",
        b'{"removed": ["a"], "absent": []}',
        b'{"removed": ["a", "b", "c"], "absent": []}',
        b'{"removed": ["a", "b"], "absent": ["b"]}',
        b'{"removed": ["a", "a", "b"], "absent": []}',
        b'{"removed": ["a"], "absent": [7]}',
        b'{"removed": ["a", "b"], "absent": [], "failed": []}',
        b'{"removed": "ab"}',
    ],
)
async def test_a_removal_that_does_not_name_each_rollout_once_is_refused(content: bytes) -> None:
    async with Answers(httpx.Response(200, content=content)).client() as client:
        with pytest.raises(MalformedAnswerError, match="asking to delete rollout a and 1 more"):
            await client.delete(["a", "b"])


async def test_the_order_of_a_servers_answer_does_not_matter() -> None:
    answer = {"schema_version": 2, "removed": ["d", "a"], "absent": ["c", "b"]}
    async with Answers(httpx.Response(200, json=answer)).client() as client:
        done = await client.delete(["a", "b", "c", "d"])
    assert done == RolloutRemoval(removed=["a", "d"], absent=["b", "c"])


async def test_a_server_that_is_not_there_or_says_nothing_is_unavailable() -> None:
    left = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    # Port 1 is reserved and nothing listens there.
    async with RolloutControlClient("http://127.0.0.1:1", TOKEN) as client:
        with pytest.raises(StoreUnavailableError, match=r"rollout r at http://127\.0\.0\.1:1: ConnectError"):
            await client.manifest("r")
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        async with RolloutControlClient(f"http://127.0.0.1:{port}", TOKEN, timeout=0.1) as client:
            with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.1 seconds"):
                await client.manifest("r")
        await asyncio.wait_for(left.wait(), 10)


@pytest.mark.parametrize(
    "failure",
    [httpx.ReadError("broken"), httpx.RemoteProtocolError(f"echo {TOKEN}"), httpx.PoolTimeout("full")],
)
async def test_a_connection_that_breaks_is_unavailable_and_not_tried_again(failure: Exception) -> None:
    server = Answers(failure)
    async with server.client() as client:
        with pytest.raises(StoreUnavailableError) as refused:
            await client.delete(["r"])
    assert TOKEN not in str(refused.value)
    assert refused.value.__cause__ is failure
    assert len(server.requests) == 1


async def test_the_token_is_in_no_error_repr_or_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen = []
    for status in (200, 400, 401, 409, 503):
        server = saying(status, f"you sent Authorization: Bearer {TOKEN}")
        async with server.client() as client:
            seen.append(repr(client))
            for call in (client.manifest("r"), client.retire(["r"])):
                with pytest.raises(Exception, match=r"http://control\.test") as refused:
                    await call
                seen.append(repr(refused.value))
        assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    async with control(RememberingLedger()) as client:
        await client.manifest("r")
    assert len(seen) == 15
    assert TOKEN not in "".join(seen)
    assert TOKEN not in caplog.text
    assert caplog.records


async def test_a_redirect_is_not_followed() -> None:
    server = Answers(httpx.Response(307, headers={"Location": "http://elsewhere.test/"}))
    async with server.client() as client:
        with pytest.raises(ControlError, match="307, Temporary Redirect: are these the control routes"):
            await client.manifest("r")
    assert len(server.requests) == 1


async def test_a_proxy_of_the_environment_does_not_get_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with control(RememberingLedger()) as client:
        assert (await client.manifest("r")).records == []


async def test_a_detail_of_any_form_is_one_bounded_line() -> None:
    for answer, said in (
        (
            httpx.Response(422, json={"detail": [{"loc": ["body"], "msg": "bad"}]}),
            '[{"loc": ["body"], "msg": "bad"}]',
        ),
        (httpx.Response(422, json={"detail": ""}), "no reason"),
        (httpx.Response(422, json=["x"]), "are these the control routes?"),
        (httpx.Response(422, content=b"\xff"), "are these the control routes?"),
        (httpx.Response(422, json={"detail": "x" * 10_000}), "x" * 500),
    ):
        async with Answers(answer).client() as client:
            with pytest.raises(InvalidRecordError) as refused:
                await client.manifest("r")
        assert str(refused.value).endswith(said)
        assert len(str(refused.value)) < 700


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "control",
        "localhost:8765",
        "ftp://host",
        "http://",
        "http://me:s3cret@host",
        "http://host?s3cret=1",
        "http://host#s3cret",
        "http://host:s3cret",
        "http://[s3cret",
        "http://host\n",
    ],
)
def test_a_url_that_cannot_be_a_server_is_refused_and_not_shown(base_url: str) -> None:
    with pytest.raises(ValueError, match="base_url must be http://host:port") as refused:
        RolloutControlClient(base_url, TOKEN)
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "s3cr et", "s3cret\n", "s3crét"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValueError, match=r"^auth_token") as refused:
        RolloutControlClient(URL, token)
    assert "s3cr" not in str(refused.value)


async def test_a_path_in_the_base_url_stands_before_the_routes() -> None:
    server = Answers(httpx.Response(200, json=EMPTY))
    async with RolloutControlClient(f"{URL}/policy/", TOKEN, transport=server) as client:
        await client.manifest("r")
    assert str(server.requests[0].url) == (f"{URL}/policy/training-token-capture/control/rollouts/r/manifest")


async def test_closing_twice_is_fine() -> None:
    client = RolloutControlClient(URL, TOKEN)
    await client.close()
    await client.close()
