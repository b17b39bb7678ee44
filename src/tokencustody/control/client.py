"""The trainer's side of the control routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError

from tokencustody.control.errors import (
    ControlAuthError,
    ControlError,
    MalformedAnswerError,
    RemovalRefusedError,
)
from tokencustody.control.wire import CONTROL_ROUTE_PREFIX, MAX_ROLLOUTS_PER_REQUEST, check_auth_token
from tokencustody.errors import InvalidRecordError, RolloutRetiredError, StoreUnavailableError
from tokencustody.ids import check_batch, check_rollout_id
from tokencustody.staging.records import RolloutManifest, RolloutRemoval

DEFAULT_TIMEOUT = 60.0
# A ledger removes rollout by rollout, each durably, so the answer to a large batch takes its time.
REMOVAL_SECONDS = 0.05
_LONGEST_DETAIL = 500

_ERRORS: dict[int, type[Exception]] = {
    400: InvalidRecordError,
    401: ControlAuthError,
    403: ControlAuthError,
    409: RemovalRefusedError,
    410: RolloutRetiredError,
    413: InvalidRecordError,
    422: InvalidRecordError,
    502: StoreUnavailableError,
    503: StoreUnavailableError,
    504: StoreUnavailableError,
}


class RolloutControlClient:
    """Reads manifests and removes rollouts through the control routes of `base_url`.

    `timeout` bounds, in seconds, each wait for the server: to connect, to send, and for its next bytes; a removal may
    take another 0.05 seconds for each of its rollouts. `transport` replaces httpx's own, for a proxy, a client
    certificate or a test; the client closes it. Proxies and credentials of the environment are not used and redirects
    not followed, so that the token goes to `base_url` alone. Every request has a connection of its own, so one client
    serves any event loop and never meets a connection that the server has just closed.

    No request is repeated. All of them are safe to repeat, but a removal that is repeated answers what is left: a
    rollout whose records the lost answer would have listed as removed is then absent.

    Raises InvalidRecordError (a ValueError) for a URL or token that cannot be used. The methods raise ControlAuthError
    when the token is not accepted, StoreUnavailableError when the server or its store cannot be reached in time,
    MalformedAnswerError for an answer that is not what was asked for, and ControlError for any other refusal.
    """

    def __init__(
        self,
        base_url: str,
        auth_token: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base_url = _check_base_url(base_url)
        self._auth_token = check_auth_token(auth_token)
        self._timeout = timeout
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {auth_token}", "Accept": "application/json"},
            transport=transport,
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def manifest(self, rollout_id: str) -> RolloutManifest:
        """Return the rollout's ledger in commit order. One that is unknown has an empty manifest.

        Raises RolloutRetiredError for a retired rollout, InvalidRecordError for an id outside the rules, and
        MalformedAnswerError for the manifest of another rollout.
        """
        check_rollout_id(rollout_id)
        what = f"reading the manifest of rollout {rollout_id}"
        # The ids . and .. are valid, and a path segment must not mean them.
        segment = rollout_id if rollout_id.strip(".") else rollout_id.replace(".", "%2E")
        content = await self._request("GET", f"/rollouts/{segment}/manifest", what)
        try:
            manifest = RolloutManifest.model_validate_json(content)
        except ValidationError as exc:
            said = f"the answer is no manifest: {_first_problem(exc)}"
            raise self._error(MalformedAnswerError, what, said) from None
        if manifest.rollout_id != rollout_id:
            said = f"the answer is the manifest of rollout {manifest.rollout_id!r}"
            raise self._error(MalformedAnswerError, what, said)
        return manifest

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove the records of rollouts and keep their fences, so that a late write is still refused.

        `removed` lists the rollouts that had records, `absent` the others, each once and in input order. The whole
        batch is checked before the first request: TypeError for a bare string or what is no sequence,
        InvalidRecordError (a ValueError) that names the first id outside the rules. No ids, no request. More than
        4,096 are sent in several requests; when one of them fails, the error says how many rollouts were done before.

        Raises RemovalRefusedError when the server refuses the removal.
        """
        return await self._remove("retire", rollout_ids)

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove the records and fences of rollouts, after which their ids read as unused. Otherwise as `retire`."""
        return await self._remove("delete", rollout_ids)

    async def close(self) -> None:
        """Release resources. Idempotent."""
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"RolloutControlClient({self._base_url!r})"

    async def _remove(self, verb: str, rollout_ids: Sequence[str]) -> RolloutRemoval:
        wanted = check_batch(rollout_ids)
        removed: set[str] = set()
        for start in range(0, len(wanted), MAX_ROLLOUTS_PER_REQUEST):
            batch = wanted[start : start + MAX_ROLLOUTS_PER_REQUEST]
            what = f"asking to {verb} rollout {batch[0]}"
            if len(batch) > 1:
                what += f" and {len(batch) - 1:,} more"
            if start:
                what += f" (the {start:,} before them are done)"
            removed.update(await self._remove_batch(verb, batch, what))
        return RolloutRemoval(
            removed=[rollout_id for rollout_id in wanted if rollout_id in removed],
            absent=[rollout_id for rollout_id in wanted if rollout_id not in removed],
        )

    async def _remove_batch(self, verb: str, batch: list[str], what: str) -> list[str]:
        content = await self._request("POST", f"/rollouts/{verb}", what, batch)
        try:
            answer = RolloutRemoval.model_validate_json(content)
        except ValidationError as exc:
            said = f"the answer is no removal: {_first_problem(exc)}"
            raise self._error(MalformedAnswerError, what, said) from None
        if sorted([*answer.removed, *answer.absent]) != sorted(batch):
            said = "the answer does not name each of these rollouts once"
            raise self._error(MalformedAnswerError, what, said)
        return answer.removed

    async def _request(
        self, method: str, path: str, what: str, rollout_ids: Sequence[str] | None = None
    ) -> bytes:
        wait = self._timeout + REMOVAL_SECONDS * len(rollout_ids or ())
        try:
            response = await self._client.request(
                method,
                self._base_url + CONTROL_ROUTE_PREFIX + path,
                json=None if rollout_ids is None else {"rollout_ids": rollout_ids},
                timeout=httpx.Timeout(self._timeout, read=wait),
            )
        except httpx.TimeoutException as exc:
            said = f"no answer within {wait:g} seconds"
            raise self._error(StoreUnavailableError, what, said) from exc
        except httpx.RequestError as exc:
            raise self._error(StoreUnavailableError, what, f"{type(exc).__name__}: {exc}") from exc
        if response.status_code != 200:
            kind = _ERRORS.get(response.status_code, ControlError)
            raise self._error(kind, what, f"{response.status_code}, {_detail(response)}")
        return response.content

    def _error(self, kind: type[Exception], what: str, said: str) -> Exception:
        # A server or proxy may echo what it was sent.
        return kind(f"{what} at {self._base_url}: {said.replace(self._auth_token, '***')}")


def _check_base_url(base_url: str) -> str:
    try:
        url = httpx.URL(base_url)
        urlsplit(base_url)  # refuses the brackets that httpx takes for a name
    except (ValueError, httpx.InvalidURL):
        url = httpx.URL("")
    # Not shown: it may hold a password.
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise InvalidRecordError(
            "base_url must be http://host:port or https://host:port, with a path if the app is mounted under one, "
            "and without credentials, query or fragment"
        )
    return str(url).rstrip("/")


def _detail(response: httpx.Response) -> str:
    """Return what the server said is wrong, on one line."""
    try:
        detail = response.json()["detail"]
    except (ValueError, LookupError, TypeError):
        return f"{response.reason_phrase or 'no reason'}: are these the control routes?"
    text = detail if isinstance(detail, str) else json.dumps(detail)
    return " ".join(text.split())[:_LONGEST_DETAIL] or "no reason"


def _first_problem(exc: ValidationError) -> str:
    problem = exc.errors(include_input=False, include_context=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc']) or 'body'}: {problem['msg']}"
