"""Ways in which bytes go wrong."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence


def mutated(rng: random.Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` with one to three things gone wrong, perhaps with a piece of one of `others`."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_MUTATIONS)(rng, data, others)
    return data


def flipped(rng: random.Random, data: bytes, start: int = 0, end: int | None = None) -> bytes:
    """Return `data` with one bit flipped, between `start` and `end`."""
    end = len(data) if end is None else min(end, len(data))
    if start >= end:
        return data
    changed = bytearray(data)
    changed[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    return flipped(rng, data)


def _flip_early(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    return flipped(rng, data, 0, 28)


def _set(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def _truncate(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _extend(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    return data + rng.choice((b"\0", b" ", b"}", rng.randbytes(rng.randint(1, 40)), data))


def _zero(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    length = rng.randint(1, 512)
    return data[:start] + bytes(len(data[start : start + length])) + data[start + length :]


def _cut_out(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randint(1, 16) :]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    at = rng.randrange(len(data) + 1)
    from_ = at if rng.random() < 0.5 else rng.randrange(len(other) + 1)
    return data[:at] + other[from_:]


def _number(rng: random.Random, data: bytes, _others: Sequence[bytes]) -> bytes:
    number = rng.choice((1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 32, 1 << 24, 1 << 20, 1, 0))
    at = rng.choice((4, 8, 12, 16, 20, rng.randrange(len(data) + 1)))
    return data[:at] + struct.pack("<Q", number) + data[at + 8 :]


_MUTATIONS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip,
    _flip,
    _flip_early,
    _set,
    _truncate,
    _extend,
    _zero,
    _cut_out,
    _splice,
    _number,
)
