"""The control routes over a real socket: every status, and what no request may reach or learn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.control.serving import (
    AUTH,
    DELETE,
    PREFIX,
    RETIRE,
    TOKEN,
    RememberingLedger,
    exchange,
    manifest_path,
    serving,
)
from tests.support.ledger import make_commit
from tokencustody.control import install_rollout_control_routes, routes
from tokencustody.control.wire import MAX_BODY_BYTES
from tokencustody.errors import InvalidRecordError, RolloutRetiredError
from tokencustody.staging.records import RolloutRemoval
from tokencustody.store import SqlLineageStore

JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def control(
    ledger: Any, app: Starlette | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the routes of a ledger, and yield a client that sends the token."""
    async with (
        serving(control_app(ledger, app, **options)) as url,
        httpx.AsyncClient(base_url=url, headers=AUTH, trust_env=False) as client,
    ):
        yield client


def control_app(ledger: Any, app: Starlette | None = None, **options: Any) -> Starlette:
    app = app or FastAPI()
    install_rollout_control_routes(app, ledger, auth_token=TOKEN, **options)
    return app


def request_bytes(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: here", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


async def test_a_manifest_is_the_ledger_in_commit_order(ledger: SqlLineageStore) -> None:
    for call in ("call-3", "call-1", "call-2"):
        await ledger.record(make_commit(model_call_id=call))
    await ledger.record_failure("rollout-1", "call-4", "worker_capture_failed")
    async with control(ledger) as client:
        answer = await client.get(manifest_path("rollout-1"))
        unknown = await client.get(manifest_path("never-seen"))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == await ledger.manifest("rollout-1")
    assert [record["model_call_id"] for record in answer.json()["records"]] == ["call-3", "call-1", "call-2"]
    assert (unknown.status_code, unknown.json()["records"]) == (200, [])


async def test_retiring_leaves_a_fence_and_deleting_leaves_nothing(ledger: SqlLineageStore) -> None:
    await ledger.record(make_commit("held"))
    async with control(ledger) as client:
        first = await client.post(RETIRE, json={"rollout_ids": ["empty", "held", "empty"]})
        again = await client.post(RETIRE, json={"rollout_ids": ["held"]})
        retired = await client.get(manifest_path("held"))
        deleted = await client.post(DELETE, json={"rollout_ids": ["held", "empty"]})
        unused = await client.get(manifest_path("held"))
    assert (first.status_code, first.json()) == (200, {"removed": ["held"], "absent": ["empty"]})
    assert RolloutRemoval.model_validate(first.json()).removed == ["held"]
    assert again.json() == {"removed": [], "absent": ["held"]}
    assert retired.status_code == 410
    assert "held is retired" in retired.json()["detail"]
    assert deleted.json() == {"removed": [], "absent": ["held", "empty"]}
    assert (unused.status_code, unused.json()["records"]) == (200, [])


@pytest.mark.parametrize(
    "authorization",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [TOKEN.encode()],
        [b"Bearer " + TOKEN[:-1].encode()],
        [b"Bearer " + TOKEN.encode() + b"x"],
        [b"Bearer " + TOKEN.upper().encode()],
        [b"Bearer " + TOKEN.encode() + b" " + TOKEN.encode()],
        [b"Bearer " + "s3cret-tökén".encode()],
        [b"Bearer \xff\xfe"],
        [b"Bearer " + b"x" * 10_000],
        [b"Basic " + TOKEN.encode()],
        [b"Bearer " + TOKEN.encode(), b"Bearer wrong"],
        [b"Bearer wrong", b"Bearer " + TOKEN.encode()],
    ],
)
async def test_nothing_is_looked_at_without_the_token(authorization: list[bytes]) -> None:
    ledger = RememberingLedger()
    app = control_app(ledger, refuse_removal=ledger.asked.append)
    requests = [
        ("GET", manifest_path("rollout-1")),
        ("GET", manifest_path("a%20b")),
        ("POST", RETIRE),
        ("POST", DELETE),
        ("PUT", RETIRE),
        ("GET", PREFIX + "/elsewhere"),
    ]
    async with serving(app) as url:
        for method, path in requests:
            head = [f"{method} {path} HTTP/1.1", "Host: here", "Connection: close", "Content-Length: 9999999"]
            # The body never comes: the answer does not wait for it.
            raw = "\r\n".join(head).encode() + b"".join(
                b"\r\nAuthorization: " + each for each in authorization
            )
            answer = await exchange(url, raw + b"\r\n\r\n")
            assert status_of(answer) == 401
            assert b"www-authenticate: bearer" in answer.lower()
            assert "token" in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]
            assert TOKEN.encode() not in answer
    assert ledger.asked == []


async def test_the_scheme_is_read_in_any_case() -> None:
    async with control(RememberingLedger()) as client:
        answer = await client.get(manifest_path("r"), headers={"Authorization": f"bEARER  {TOKEN}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "segment",
    [
        "",
        "a%20b",
        "..%2F..%2Fetc",
        "a/b",
        "a%2Fb",
        "%00",
        "a%0A",
        "%C3%A9",
        "%FF",
        "x" * 256,
        "a;b",
        "%2e%2e%5c",
    ],
)
async def test_an_id_outside_the_rules_is_400_and_never_reaches_the_ledger(segment: str) -> None:
    ledger = RememberingLedger()
    app = control_app(ledger)
    async with serving(app) as url:
        answer = await exchange(
            url, request_bytes("GET", manifest_path(segment), f"Authorization: Bearer {TOKEN}")
        )
    assert status_of(answer) == 400
    assert b"is not 1 to 255 characters out of" in answer
    assert ledger.asked == []


@pytest.mark.parametrize("segment", [".", "..", "manifest", "retire", "x" * 255, "A-z_0.9"])
async def test_every_id_within_the_rules_is_served(segment: str) -> None:
    ledger = RememberingLedger()
    app = control_app(ledger)
    async with serving(app) as url:
        answer = await exchange(
            url, request_bytes("GET", manifest_path(segment), f"Authorization: Bearer {TOKEN}")
        )
    assert (status_of(answer), ledger.asked) == (200, [segment])


@pytest.mark.parametrize("bad", ["", "a b", "../x", "é", "x" * 256, "a\n", "a/b", "\0"])
async def test_one_bad_id_in_a_batch_is_400_and_nothing_is_removed(bad: str) -> None:
    ledger = RememberingLedger("good")
    async with control(ledger) as client:
        answer = await client.post(RETIRE, json={"rollout_ids": ["good", bad]})
    assert answer.status_code == 400
    assert "rollout_ids[1]" in answer.json()["detail"]
    assert ledger.asked == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'["a"]',
        b"{}",
        b'{"rollout_ids": null}',
        b'{"rollout_ids": "a"}',
        b'{"rollout_ids": []}',
        b'{"rollout_ids": {"a": 1}}',
        b'{"rollout_ids": [1]}',
        b'{"rollout_ids": [true]}',
        b'{"rollout_ids": [null]}',
        b'{"rollout_ids": [["a"]]}',
        b'{"rollout_ids": ["\\ud800"]}',
        b'{"rollout_ids": ["a"], "dry_run": true}',
        b'{"rollout_ids": ["a"]} x',
        b'{"rollout_ids": ["\xff"]}',
        b'{"rollout_ids": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        json.dumps({"rollout_ids": [f"r{number}" for number in range(4_097)]}).encode(),
        json.dumps({"rollout_ids": ["same"] * 4_097}).encode(),
    ],
)
async def test_a_malformed_body_is_422_and_nothing_is_removed(body: bytes) -> None:
    ledger = RememberingLedger()
    async with control(ledger) as client:
        answer = await client.post(DELETE, content=body, headers=JSON)
    assert answer.status_code == 422
    assert 'send {"rollout_ids": [...]}' in answer.json()["detail"]
    assert ledger.asked == []


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
async def test_a_body_that_does_not_claim_to_be_json_is_422(content_type: str | None) -> None:
    ledger = RememberingLedger()
    headers = {"Content-Type": content_type} if content_type else {}
    async with control(ledger) as client:
        answer = await client.post(RETIRE, content=b'{"rollout_ids": ["a"]}', headers=headers)
        charset = await client.post(
            RETIRE,
            content=b'{"rollout_ids": ["a"]}',
            headers={"Content-Type": "Application/JSON; charset=utf-8"},
        )
    assert (answer.status_code, charset.status_code) == (422, 200)
    assert "Content-Type: application/json" in answer.json()["detail"]


async def test_4096_ids_of_255_characters_are_accepted_however_the_json_is_laid_out() -> None:
    ledger = RememberingLedger()
    ids = [f"{number:0255d}" for number in range(4_096)]
    async with control(ledger) as client:
        for body in (json.dumps({"rollout_ids": ids}), json.dumps({"rollout_ids": ids}, indent=4)):
            answer = await client.post(RETIRE, content=body.encode(), headers=JSON)
            assert (answer.status_code, answer.json()["absent"]) == (200, ids)


async def test_a_body_that_declares_to_be_too_large_is_413_before_it_is_sent() -> None:
    ledger = RememberingLedger()
    app = control_app(ledger)
    async with serving(app) as url:
        headers = [f"Authorization: Bearer {TOKEN}", "Content-Type: application/json"]
        answer = await exchange(
            url, request_bytes("POST", RETIRE, *headers, f"Content-Length: {MAX_BODY_BYTES + 1}", body=b"{")
        )
    assert status_of(answer) == 413
    assert b"4,096 ids at a time" in answer
    assert ledger.asked == []


async def test_a_body_without_a_declared_length_is_cut_off_at_the_limit() -> None:
    ledger = RememberingLedger()
    app = control_app(ledger)
    chunk = b"%x\r\n%s\r\n" % (MAX_BODY_BYTES + 1, b" " * (MAX_BODY_BYTES + 1))
    headers = [
        f"Authorization: Bearer {TOKEN}",
        "Content-Type: application/json",
        "Transfer-Encoding: chunked",
    ]
    async with serving(app) as url:
        # No last chunk: the answer comes although the body has no end.
        answer = await exchange(url, request_bytes("POST", RETIRE, *headers, body=chunk))
    assert status_of(answer) == 413
    assert ledger.asked == []


async def test_a_body_that_does_not_arrive_in_time_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.05)
    ledger = RememberingLedger()
    app = control_app(ledger)
    headers = [f"Authorization: Bearer {TOKEN}", "Content-Type: application/json", "Content-Length: 22"]
    async with serving(app) as url:
        answer = await exchange(url, request_bytes("POST", RETIRE, *headers, body=b'{"rollout_ids"'))
    assert status_of(answer) == 408
    assert ledger.asked == []


async def test_a_body_in_pieces_is_read_to_its_end() -> None:
    ledger = RememberingLedger("a")
    app = control_app(ledger)
    body = b'{"rollout_ids": ["a"]}'
    head = request_bytes(
        "POST",
        RETIRE,
        f"Authorization: Bearer {TOKEN}",
        "Content-Type: application/json",
        "Content-Length: 22",
    )

    async def let_the_server_read() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async with serving(app) as url:
        pieces = [head, *(body[at : at + 1] for at in range(len(body)))]
        answer = await exchange(url, *pieces, before_next=let_the_server_read)
    assert status_of(answer) == 200
    assert ledger.asked == [["a"]]


async def test_a_client_that_leaves_in_the_middle_of_its_body_removes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = RememberingLedger("a")
    app = control_app(ledger)
    head = request_bytes(
        "POST",
        RETIRE,
        f"Authorization: Bearer {TOKEN}",
        "Content-Type: application/json",
        "Content-Length: 99",
    )
    async with serving(app) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b'{"rollout_ids": ["a"]}')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        answer = await exchange(
            url, request_bytes("GET", manifest_path("b"), f"Authorization: Bearer {TOKEN}")
        )
    assert status_of(answer) == 200
    assert ledger.asked == ["b"]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", manifest_path("r"), "GET"),
        ("DELETE", manifest_path("r"), "GET"),
        ("GET", RETIRE, "POST"),
        ("GET", DELETE, "POST"),
        ("DELETE", DELETE, "POST"),
    ],
)
async def test_another_method_is_405_and_named(method: str, path: str, allowed: str) -> None:
    ledger = RememberingLedger()
    async with control(ledger) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json() == {"detail": f"use {allowed}"}
    assert ledger.asked == []


async def test_other_paths_below_the_prefix_are_404() -> None:
    async with control(RememberingLedger()) as client:
        for path in (
            "/",
            "/rollouts",
            "/rollouts/manifest",
            "/rollouts/retire/",
            "/rollouts/r/rows",
            "/manifest",
        ):
            answer = await client.get(PREFIX + path)
            assert (answer.status_code, "no such control route" in answer.json()["detail"]) == (404, True)


async def test_a_refused_removal_is_409_with_its_reason_and_touches_nothing(ledger: SqlLineageStore) -> None:
    await ledger.record(make_commit("held"))
    asked = []

    def refuse(rollout_ids: list[str]) -> str:
        asked.append(rollout_ids)
        return "rollout held is still \ud800 running"

    async with control(ledger, refuse_removal=refuse) as client:
        for path in (RETIRE, DELETE):
            answer = await client.post(path, json={"rollout_ids": ["held", "other", "held"]})
            assert answer.status_code == 409
            assert answer.json() == {"detail": "rollout held is still \\ud800 running"}
        manifest = await client.get(manifest_path("held"))
    assert asked == [["held", "other"]] * 2
    assert len(manifest.json()["records"]) == 1


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_refusal_may_ask_for_no_ids(awaited: bool) -> None:
    ledger = RememberingLedger("a")
    answers = iter(["a rollout is running", None])

    def refuse() -> Any:
        answer = next(answers)
        return asyncio.sleep(0, answer) if awaited else answer

    async with control(ledger, refuse_removal=refuse) as client:
        refused = await client.post(RETIRE, json={"rollout_ids": ["a"]})
        allowed = await client.post(DELETE, json={"rollout_ids": ["a"]})
    assert (refused.status_code, refused.json()) == (409, {"detail": "a rollout is running"})
    assert (allowed.status_code, ledger.asked) == (200, [["a"]])


async def test_the_refusal_may_be_awaited_and_none_allows_the_removal() -> None:
    ledger = RememberingLedger("a", "b")

    async def refuse(rollout_ids: list[str]) -> str | None:
        await asyncio.sleep(0)
        return "" if "a" in rollout_ids else None

    async with control(ledger, refuse_removal=refuse) as client:
        refused = await client.post(RETIRE, json={"rollout_ids": ["a"]})
        allowed = await client.post(RETIRE, json={"rollout_ids": ["b"]})
    assert (refused.status_code, refused.json()["detail"]) == (409, "these rollouts must not be removed now")
    assert allowed.json() == {"removed": ["b"], "absent": []}
    assert ledger.asked == [["b"]]


@pytest.mark.parametrize("answer", [True, False, 0, RuntimeError("s3cret path")])
async def test_a_refusal_that_fails_or_answers_nonsense_removes_nothing(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = RememberingLedger("a")

    def refuse(_: list[str]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with control(ledger, refuse_removal=refuse) as client:
        response = await client.post(RETIRE, json={"rollout_ids": ["a"]})
    assert (response.status_code, response.json()) == (500, {"detail": "the server failed; its log says why"})
    assert ledger.asked == []
    assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_an_unavailable_store_is_503_and_its_address_stays_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Port 1 is reserved and nothing listens there.
    url = "postgresql://me:s3cret@127.0.0.1:1/captures"
    async with SqlLineageStore(url, deadline=0.2) as ledger, control(ledger) as client:
        answers = [
            await client.get(manifest_path("r")),
            await client.post(RETIRE, json={"rollout_ids": ["r"]}),
        ]
    for answer in answers:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert "repeat" in answer.json()["detail"]
        assert "captures" not in answer.text
        assert "127.0.0.1" not in answer.text
    assert "postgresql://me@127.0.0.1:1/captures is not available" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_database_of_another_revision_is_503(empty_postgres_url: str) -> None:
    async with SqlLineageStore(empty_postgres_url) as ledger, control(ledger) as client:
        answer = await client.get(manifest_path("r"))
    assert answer.status_code == 503


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (ConnectionResetError("gone"), 503),
        (TimeoutError(), 503),
        (InvalidRecordError("rollout_id: too long for this ledger"), 400),
        (ValueError("s3cret"), 500),
        (KeyError("s3cret"), 500),
    ],
)
async def test_what_a_ledger_raises_becomes_its_status_without_its_text_when_it_is_a_fault(
    failure: Exception, status: int
) -> None:
    ledger = RememberingLedger()
    ledger.failure = failure
    async with control(ledger) as client:
        for answer in (
            await client.get(manifest_path("r")),
            await client.post(RETIRE, json={"rollout_ids": ["r"]}),
        ):
            assert answer.status_code == status
            assert list(answer.json()) == ["detail"]
            assert "s3cret" not in answer.text
            assert "Traceback" not in answer.text


@pytest.mark.parametrize("kind", [FastAPI, Starlette])
async def test_the_routes_stand_before_the_apps_own_routes_handlers_and_debug_pages(
    kind: type[Starlette],
) -> None:
    async def theirs(_request: Request, _exc: Any = None) -> Response:
        return PlainTextResponse("theirs", 299)

    handlers = {Exception: theirs, 404: theirs, 401: theirs, RolloutRetiredError: theirs}
    app = kind(debug=True, exception_handlers=handlers, routes=[Route("/{path:path}", theirs)])
    ledger = RememberingLedger()
    async with control(ledger, app) as client:
        assert (await client.get(manifest_path("r"))).status_code == 200
        assert (await client.get(manifest_path("r"), headers={"Authorization": ""})).status_code == 401
        assert (await client.get(PREFIX + "/elsewhere")).status_code == 404
        ledger.failure = RolloutRetiredError("r is retired")
        assert (await client.get(manifest_path("r"))).status_code == 410
        ledger.failure = ZeroDivisionError()
        assert (await client.get(manifest_path("r"))).status_code == 500
        assert (await client.get("/anything")).text == "theirs"
        assert (await client.get(PREFIX)).text == "theirs"


async def test_the_routes_work_below_the_path_at_which_the_app_is_mounted() -> None:
    inner = FastAPI()
    install_rollout_control_routes(inner, RememberingLedger(), auth_token=TOKEN)
    outer = FastAPI()
    outer.mount("/policy", inner)
    async with (
        serving(outer) as url,
        httpx.AsyncClient(base_url=url, headers=AUTH, trust_env=False) as client,
    ):
        assert (await client.get("/policy" + manifest_path("r"))).json()["rollout_id"] == "r"
        assert (await client.get(manifest_path("r"))).status_code == 404


def test_the_routes_are_no_part_of_the_apps_own_schema() -> None:
    app = FastAPI()
    install_rollout_control_routes(app, RememberingLedger(), auth_token=TOKEN)
    assert app.openapi()["paths"] == {}


def test_installing_twice_is_refused() -> None:
    app = FastAPI()
    install_rollout_control_routes(app, RememberingLedger(), auth_token=TOKEN)
    with pytest.raises(ValueError, match="installed on this app already"):
        install_rollout_control_routes(app, RememberingLedger(), auth_token="other")


@pytest.mark.parametrize("token", ["", " ", "s3cr et", "s3cret\n", "s3crét", "\ud800s3cr"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    app = FastAPI()
    with pytest.raises(ValueError, match=r"^auth_token") as refused:
        install_rollout_control_routes(app, RememberingLedger(), auth_token=token)
    assert "s3cr" not in str(refused.value)
    assert len(app.routes) == len(FastAPI().routes)


@pytest.mark.parametrize("token", [None, b"token", 7])
def test_a_token_of_another_type_is_a_type_error(token: Any) -> None:
    with pytest.raises(TypeError, match="auth_token must be a string"):
        install_rollout_control_routes(FastAPI(), RememberingLedger(), auth_token=token)


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        (None, "NoneType lacks manifest, retire, delete"),
        (object(), "object lacks manifest, retire, delete"),
        (SqlLineageStore, "SqlLineageStore lacks one"),
    ],
)
def test_what_is_no_ledger_is_refused(ledger: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        install_rollout_control_routes(FastAPI(), ledger, auth_token=TOKEN)


def test_a_callback_that_cannot_be_called_and_an_app_of_another_kind_are_refused() -> None:
    ledger: Any = RememberingLedger()
    with pytest.raises(TypeError, match="refuse_removal must take the rollout ids, or nothing"):
        install_rollout_control_routes(
            FastAPI(), ledger, auth_token=TOKEN, refuse_removal=lambda one, two: None
        )
    with pytest.raises(TypeError, match="refuse_removal must be a function, not str"):
        install_rollout_control_routes(FastAPI(), ledger, auth_token=TOKEN, refuse_removal="no")
    app: Any = object()
    with pytest.raises(TypeError, match="app must be a FastAPI or Starlette application, not object"):
        install_rollout_control_routes(app, ledger, auth_token=TOKEN)
