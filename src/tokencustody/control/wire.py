"""What the routes and the client agree on: addresses, the body of a removal, limits, and the form of a token."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from tokencustody.errors import InvalidRecordError

CONTROL_ROUTE_PREFIX = "/training-token-capture/control"
MAX_ROLLOUTS_PER_REQUEST = 4_096
# Ids of 255 characters, each with its quotes, comma and an indented line of its own.
MAX_BODY_BYTES = MAX_ROLLOUTS_PER_REQUEST * (255 + 17) + 1_024
# For the OpenAPI document; store.ids checks them.
ROLLOUT_ID_PATTERN = "^[A-Za-z0-9._-]{1,255}$"
_RolloutId = Annotated[StrictStr, Field(json_schema_extra={"pattern": ROLLOUT_ID_PATTERN})]


class RolloutIds(BaseModel):
    """The body of a removal. An unknown field is refused: what it asks for would silently not be done."""

    model_config = ConfigDict(extra="forbid")

    rollout_ids: Annotated[list[_RolloutId], Field(min_length=1, max_length=MAX_ROLLOUTS_PER_REQUEST)]


def check_auth_token(auth_token: str) -> str:
    """Return the token if a header can carry it: one or more visible ASCII characters.

    Raises TypeError for another type, InvalidRecordError (a ValueError), which does not show the token, otherwise.
    """
    if not isinstance(auth_token, str):
        raise TypeError(f"auth_token must be a string, not {type(auth_token).__name__}")
    if not auth_token:
        raise InvalidRecordError("auth_token is empty: the control routes are never open to everyone")
    if not all("!" <= char <= "~" for char in auth_token):
        raise InvalidRecordError(
            "auth_token must consist of visible ASCII characters, without spaces or line breaks"
        )
    return auth_token
