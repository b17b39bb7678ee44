"""Routed experts of mixture-of-experts models: which experts each token was sent to, packed as `nrlre1` text.

The envelope is `nrlre1:DTYPE:TOKENSxLAYERSxTOPK:BASE64`, its values little-endian. An older form, plain nested lists,
is read too.
"""

from __future__ import annotations

import base64
import binascii
import re
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from tokencustody.records import shown

ROUTED_EXPERTS_MAGIC = "nrlre1"
MISSING_ROUTE_SENTINEL = -1

RouteSpanMode = Literal["full", "tail", "sentinel"]

_ARRAY_TYPES = {"int8": "b", "int16": "h", "int32": "i"}
_DIMENSION = re.compile("[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class RoutedExpertsFragment:
    """Expert ids by token, layer and rank: `values[token][layer][k]`, with `MISSING_ROUTE_SENTINEL` where unknown.

    `dtype` is the integer type of the envelope, or "legacy-int" for values that came as nested lists.
    """

    values: list[list[list[int]]]
    dtype: str
    num_layers: int
    topk: int


def encode_routed_experts(values: Sequence[Sequence[Sequence[int]]], *, dtype: str = "int16") -> str:
    """Return the envelope of `values[token][layer][k]`, as "int8", "int16" or "int32".

    Raises ValueError for another dtype, values that are not a full three-dimensional block of integers, or a value
    that the dtype cannot hold.
    """
    typecode = _typecode(dtype)
    layers, topk = _block_shape(values)
    try:
        packed = array(typecode, chain.from_iterable(chain.from_iterable(values)))
    except OverflowError:
        raise ValueError(f"routed_experts: a value does not fit {dtype}") from None
    shape = f"{len(values)}x{layers}x{topk}"
    encoded = base64.b64encode(_little_endian(packed).tobytes()).decode()
    return f"{ROUTED_EXPERTS_MAGIC}:{dtype}:{shape}:{encoded}"


def decode_routed_experts(payload: Any) -> RoutedExpertsFragment:
    """Return the fragment of an envelope or of nested lists.

    Raises ValueError for anything else: another version or dtype, a shape that is not three positive dimensions,
    data that is not its canonical base64, or a length that differs from the shape.
    """
    if not isinstance(payload, str):
        layers, topk = _block_shape(payload)
        return RoutedExpertsFragment(payload, "legacy-int", layers, topk)
    dtype, (_, layers, topk), encoded = _open_envelope(payload)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("routed_experts: the data is not base64") from None
    if base64.b64encode(data).decode() != encoded:
        raise ValueError("routed_experts: the data is not canonical base64")
    flat = _little_endian(array(_typecode(dtype), data)).tolist()
    rows = [flat[start : start + topk] for start in range(0, len(flat), topk)]
    values = [rows[start : start + layers] for start in range(0, len(rows), layers)]
    return RoutedExpertsFragment(values, dtype, layers, topk)


def routed_experts_token_count(payload: Any) -> int:
    """Return how many tokens an envelope or nested lists cover, without decoding the envelope's data.

    Raises ValueError as `decode_routed_experts` does, except that the characters of the data are not looked at.
    """
    if isinstance(payload, str):
        _, (tokens, _, _), _ = _open_envelope(payload)
        return tokens
    _block_shape(payload)
    return len(payload)


def classify_route_span(*, carry_len: int, generation_len: int, staged_route_len: int) -> RouteSpanMode:
    """Say which tokens of a staged delta its routes cover: all ("full"), the generated ones ("tail"), or none.

    `carry_len` prompt tokens and `generation_len` sampled tokens form the delta. Routes for at least the sampled
    tokens are used from their end; with fewer, every token gets the sentinel. Raises ValueError for a length that is
    not an integer from 0.
    """
    lengths = {
        "carry_len": carry_len,
        "generation_len": generation_len,
        "staged_route_len": staged_route_len,
    }
    for name, length in lengths.items():
        if type(length) is not int or length < 0:
            raise ValueError(f"{name} must be an integer from 0, not {shown(length)}")
    if 0 < staged_route_len == carry_len + generation_len:
        return "full"
    return "tail" if 0 < generation_len <= staged_route_len else "sentinel"


def _open_envelope(payload: str) -> tuple[str, tuple[int, int, int], str]:
    parts = payload.split(":", 3)
    if len(parts) != 4 or parts[0] != ROUTED_EXPERTS_MAGIC:
        raise ValueError(f"routed_experts: the text is no {ROUTED_EXPERTS_MAGIC} envelope")
    _, dtype, shape, encoded = parts
    dimensions = shape.split("x")
    if len(dimensions) != 3 or not all(map(_DIMENSION.fullmatch, dimensions)):
        raise ValueError("routed_experts: the shape must be three positive integers, TOKENSxLAYERSxTOPK")
    tokens, layers, topk = map(int, dimensions)
    size = tokens * layers * topk * array(_typecode(dtype)).itemsize
    if len(encoded) != (size + 2) // 3 * 4 or len(encoded.rstrip("=")) != (size * 4 + 2) // 3:
        raise ValueError(f"routed_experts: the data is not the {size} bytes of its shape {shape}")
    return dtype, (tokens, layers, topk), encoded


def _typecode(dtype: str) -> str:
    try:
        return _ARRAY_TYPES[dtype]
    except KeyError:
        raise ValueError(f"routed_experts: unsupported dtype {shown(dtype)}") from None


def _block_shape(values: Any) -> tuple[int, int]:
    # Lists only: a row that is text or bytes would also iterate, into something that is no expert id.
    if not isinstance(values, list):
        raise ValueError(f"routed_experts: the values must be a list of tokens, not {type(values).__name__}")
    if not set(map(type, values)) <= {list}:
        raise ValueError("routed_experts: every token must be a list of layers")
    rows = list(chain.from_iterable(values))
    if not rows or len(set(map(len, values))) != 1:
        raise ValueError(
            "routed_experts: one or more tokens must have the same number of layers, at least one"
        )
    if not set(map(type, rows)) <= {list}:
        raise ValueError("routed_experts: every layer must be a list of expert ids")
    if len(set(map(len, rows))) != 1:
        raise ValueError("routed_experts: every layer must have the same number of expert ids")
    if set(map(type, chain.from_iterable(rows))) != {int}:
        raise ValueError("routed_experts: every layer must have expert ids, all of them integers")
    return len(values[0]), len(rows[0])


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
