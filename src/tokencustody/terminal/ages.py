"""How a person says "older than": a duration such as 7d, or a date."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import typer

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,9})([smhdw])", re.ASCII)

AGE_HELP = "a duration such as 90s, 30m, 12h, 7d or 2w, or a date or time in ISO 8601, in UTC unless it says otherwise"


def moment_of(age: str, option: str) -> datetime:
    """Return the moment before which something is older than `age`.

    Raises typer.BadParameter that names `option` for what is neither a duration nor a date, and for the future.
    """
    now = datetime.now(UTC)
    try:
        if said := _DURATION.fullmatch(age.strip()):
            return now - timedelta(seconds=int(said[1]) * _SECONDS[said[2]])
        moment = datetime.fromisoformat(age.strip())
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise typer.BadParameter(f"{age!r} is longer ago than dates go", param_hint=option) from None
    except ValueError:
        raise typer.BadParameter(f"{age!r} is not {AGE_HELP}", param_hint=option) from None
    if moment > now:
        raise typer.BadParameter(f"{age!r} is in the future", param_hint=option)
    return moment
