"""The bearer token: its form, and whether a request brings it."""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from starlette.requests import Request

from tokencustody.control.wire import check_auth_token


class BearerToken:
    """The one token that opens the routes. Its repr does not show it.

    Raises TypeError for a token of another type, InvalidRecordError (a ValueError) for one that no header can carry.
    """

    def __init__(self, auth_token: str) -> None:
        self._credentials = check_auth_token(auth_token).encode()

    def check(self, request: Request) -> None:
        """Raise HTTPException 401 unless the request has one Authorization header, and that has the token."""
        # Raw bytes: a header may hold what is not text, and compare_digest takes only ASCII text.
        given = [value for name, value in request.headers.raw if name == b"authorization"]
        scheme, _, credentials = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(credentials.strip(b" "), self._credentials)
        if scheme.lower() != b"bearer" or not matches:
            raise HTTPException(
                401,
                "send the server's token as 'Authorization: Bearer TOKEN'",
                {"WWW-Authenticate": "Bearer"},
            )
