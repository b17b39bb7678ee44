"""Numbers on the command lines of the campaigns."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def positive(kind: Callable[[str], Number]) -> Callable[[str], Number]:
    """Return a type for argparse: an `int` or `float` above 0."""

    def parse(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = kind("0")
        # Not a number fails this too.
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return number

    return parse
