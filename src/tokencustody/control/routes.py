"""The control routes: a rollout's manifest, and retiring and deleting rollouts, behind one bearer token."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson
from fastapi import HTTPException, Request, Response
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokencustody.control.token import BearerToken
from tokencustody.control.wire import CONTROL_ROUTE_PREFIX, MAX_BODY_BYTES, RolloutIds
from tokencustody.errors import (
    DurabilityError,
    InvalidRecordError,
    RolloutRetiredError,
    SchemaMismatchError,
    StoreClosedError,
)
from tokencustody.ids import check_batch, check_rollout_id
from tokencustody.protocols import CaptureLedger, RolloutRemovalPayload

LOGGER = logging.getLogger(__name__)

# Takes the ids, or nothing.
RefuseRemoval = Callable[..., str | Awaitable[str | None] | None]
_Removal = Callable[[list[str]], Awaitable[RolloutRemovalPayload]]

BODY_SECONDS = 30.0
_RETRY_AFTER_SECONDS = 5
_LEDGER_METHODS = ("manifest", "retire", "delete")
_MANIFEST = re.compile(r"rollouts/(.*)/manifest", re.DOTALL)

# OSError covers StoreUnavailableError and what the ledger of another maker raises when it loses its connection.
_UNAVAILABLE = (OSError, SchemaMismatchError, DurabilityError, StoreClosedError)


def install_rollout_control_routes(
    app: Starlette,
    ledger: CaptureLedger,
    *,
    auth_token: str,
    refuse_removal: RefuseRemoval | None = None,
) -> None:
    """Serve a ledger's manifests and removals on a FastAPI or Starlette app, to whoever sends the bearer token.

    - `GET /training-token-capture/control/rollouts/{rollout_id}/manifest` answers the ledger's manifest.
    - `POST /training-token-capture/control/rollouts/retire` and `.../delete` take `{"rollout_ids": [...]}` with 1 to
      4,096 ids, where a duplicate counts once, and answer `{"removed": [...], "absent": [...]}`.

    Everything below the prefix is answered here, before the app's other routes and without its exception handlers.
    Errors have the body `{"detail": "..."}`: 401 without the token, before anything else is looked at; 400 for an
    id outside the rules; 409 when removal is refused; 410 for a retired rollout; 413 and 422 for a body that is too
    large or malformed; 503 with Retry-After when the store is not available. After a 503 a part of a batch may be
    gone; to repeat it is safe, and then the answer lists that part as absent.

    `refuse_removal` is called in the event loop with the ids of a removal, each once and all valid, or with nothing
    if it takes no argument. It returns, or its awaitable does, None to allow the removal or the reason to refuse it. If
    it raises, nothing is removed.

    The app's owner closes the ledger. Raises ValueError for an empty or unusable token or when the routes are
    installed already, TypeError for an app, ledger or callback of the wrong kind.
    """
    if not isinstance(app, Starlette):
        raise TypeError(f"app must be a FastAPI or Starlette application, not {type(app).__name__}")
    missing = [name for name in _LEDGER_METHODS if not callable(getattr(ledger, name, None))]
    if missing or inspect.isclass(ledger):
        named = ledger.__name__ if inspect.isclass(ledger) else type(ledger).__name__
        raise TypeError(
            f"ledger must be a CaptureLedger instance; {named} lacks {', '.join(missing) or 'one'}"
        )
    if refuse_removal is not None and not callable(refuse_removal):
        raise TypeError(f"refuse_removal must be a function, not {type(refuse_removal).__name__}")
    endpoint = _ControlEndpoint(ledger, BearerToken(auth_token), refuse_removal)
    path = CONTROL_ROUTE_PREFIX + "/{rest:path}"
    if any(isinstance(route, Route) and route.path == path for route in app.router.routes):
        raise ValueError("the control routes are installed on this app already")
    route = Route(path, endpoint, include_in_schema=False)
    # Starlette's own expression matches no line break, and such a path would reach the app's other routes.
    route.path_regex = re.compile(re.escape(CONTROL_ROUTE_PREFIX) + r"/(?P<rest>.*)\Z", re.DOTALL)
    # First, so that a catch-all route of the app cannot take the requests.
    app.router.routes.insert(0, route)


class _ControlEndpoint:
    """An ASGI application: an ordinary endpoint's exceptions would go to the handlers of the surrounding app."""

    def __init__(
        self, ledger: CaptureLedger, token: BearerToken, refuse_removal: RefuseRemoval | None
    ) -> None:
        self._ledger = ledger
        self._token = token
        self._refuse_removal = refuse_removal
        self._tells_ids = refuse_removal is not None and _takes_ids(refuse_removal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            self._token.check(request)
            response = _json(200, await self._answer(request, scope["path_params"]["rest"]))
        except HTTPException as exc:
            response = _json(exc.status_code, {"detail": exc.detail}, exc.headers)
        except ClientDisconnect:
            return
        except Exception:
            LOGGER.exception("a control request failed")
            response = _json(500, {"detail": "the server failed; its log says why"})
        await response(scope, receive, send)

    async def _answer(self, request: Request, rest: str) -> Any:
        """Return what a request with the right token is answered; HTTPException where that is an error."""
        removals: dict[str, _Removal] = {
            "rollouts/retire": self._ledger.retire,
            "rollouts/delete": self._ledger.delete,
        }
        if rest in removals:
            require_method(request, "POST")
            return await self._remove(request, removals[rest])
        if (matched := _MANIFEST.fullmatch(rest)) is not None:
            require_method(request, "GET")
            return await self._manifest(matched[1])
        raise HTTPException(
            404, "there is no such control route; see rollouts/ID/manifest, rollouts/retire, rollouts/delete"
        )

    async def _manifest(self, rollout_id: str) -> dict[str, Any]:
        try:
            return await self._ledger.manifest(check_rollout_id(rollout_id))
        except InvalidRecordError as exc:
            raise HTTPException(400, str(exc)) from None
        except RolloutRetiredError:
            raise HTTPException(
                410,
                f"rollout {rollout_id} is retired: its manifest is gone; do not read it as one without calls",
            ) from None
        except _UNAVAILABLE as exc:
            raise _unavailable(exc, "repeat the request") from None

    async def _remove(self, request: Request, remove: _Removal) -> dict[str, list[str]]:
        rollout_ids = await _read_rollout_ids(request)
        await self._ask_whether_removable(rollout_ids)
        try:
            done = await remove(rollout_ids)
        except InvalidRecordError as exc:
            raise HTTPException(400, str(exc)) from None
        except _UNAVAILABLE as exc:
            raise _unavailable(exc, "a part of the batch may be done; repeating it is safe") from None
        return {"removed": list(done["removed"]), "absent": list(done["absent"])}

    async def _ask_whether_removable(self, rollout_ids: list[str]) -> None:
        if self._refuse_removal is None:
            return
        reason = self._refuse_removal(*([list(rollout_ids)] if self._tells_ids else []))
        if inspect.isawaitable(reason):
            reason = await reason
        if reason is None:
            return
        if not isinstance(reason, str):
            raise TypeError(f"refuse_removal must return a reason or None, not {type(reason).__name__}")
        said = reason.encode(errors="backslashreplace").decode()
        raise HTTPException(409, said or "these rollouts must not be removed now")


def _takes_ids(refuse_removal: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(refuse_removal)
    except ValueError:
        return True  # it is written in another language, and does not tell
    with suppress(TypeError):
        signature.bind([])
        return True
    with suppress(TypeError):
        signature.bind()
        return False
    raise TypeError("refuse_removal must take the rollout ids, or nothing")


def require_method(request: Request, method: str) -> None:
    """Raise HTTPException 405, which names the method, unless the request has it."""
    if request.method != method:
        raise HTTPException(405, f"use {method}", {"Allow": method})


async def _read_rollout_ids(request: Request) -> list[str]:
    """Return the valid ids of the body, each once."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise HTTPException(422, "send JSON, with the header 'Content-Type: application/json'")
    body = await _read_body(request)
    try:
        rollout_ids = RolloutIds.model_validate_json(body).rollout_ids
        if len(json.loads(body, object_pairs_hook=list)) > 1:
            raise HTTPException(422, 'rollout_ids: given twice; send {"rollout_ids": [...]} once')
        return check_batch(rollout_ids)
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_context=False, include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "body"
        raise HTTPException(
            422, f'{where}: {problem["msg"]}; send {{"rollout_ids": [...]}} with 1 to 4,096 ids'
        ) from None
    except InvalidRecordError as exc:
        raise HTTPException(400, str(exc)) from None


async def _read_body(request: Request) -> bytes:
    too_large = HTTPException(
        413, f"the body is larger than {MAX_BODY_BYTES:,} bytes; send 1 to 4,096 ids at a time"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None
    return bytes(body)


def _unavailable(exc: Exception, advice: str) -> HTTPException:
    # The cause names hosts and users of the database, which the log may know and the network need not.
    LOGGER.warning("a control request found the store unavailable: %s", exc)
    return HTTPException(
        503,
        f"the capture store is not available, the server's log says why; {advice}",
        {"Retry-After": str(_RETRY_AFTER_SECONDS)},
    )


def _json(status: int, document: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(document), status, headers, "application/json")
