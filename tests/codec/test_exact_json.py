"""What is read fast is what Python's own parser reads, in every bit, and what that refuses is refused in its words."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tokencustody.codec import exact_json
from tokencustody.codec.exact_json import parse_json

_TEXTS = {
    "the largest of 64 bits": b"[18446744073709551615, -9223372036854775808]",
    "beyond 64 bits": b"[18446744073709551616]",
    "beyond 64 bits, alone": b"18446744073709551616",
    "beyond 64 bits, as a value": b'{"a":-9223372036854775809}',
    "beyond 64 bits, behind a line break": b"[1,\n123456789012345678901234567890]",
    "beyond 64 bits, behind a long fraction": b"[0.12345678901234567890123, 99999999999999999999]",
    "of 5,000 digits": b"[" + b"9" * 5_000 + b"]",
    "a fraction of many digits": b"[0.00012345678901234567, 1.1000000000000000888178419700125232338905334472656]",
    "a large float of many digits": b"[123456789012345678901234567890.5, 12345678901234567890e3]",
    "an infinity by its exponent": b"[1e400, -1e400, 1e-400]",
    "no numbers": b"[NaN, Infinity, -Infinity]",
    "zeros": b"[-0, -0.0, 0, 0.0]",
    "a lone surrogate, escaped": b'["\\ud800", "\\udc00\\ud800"]',
    "a pair of surrogates": b'["\\ud83d\\ude00"]',
    "a lone surrogate, in bytes": b'["\xed\xa0\x80"]',
    "no UTF-8": b'["\xff"]',
    "a byte order mark": b"\xef\xbb\xbf[1]",
    "UTF-16": "[1]".encode("utf-16-le"),
    "UTF-32": "[1]".encode("utf-32"),
    "a key twice": b'{"a": 1, "b": 2, "a": {"c": 3, "c": 4}}',
    "NUL in text": b'["\\u0000"]',
    "a control character in text": b'["\x01"]',
    "nothing": b"",
    "white space": b" \t\r\n",
    "torn": b'{"a": [1, 2',
    "more behind it": b"{} {}",
    "a comma too many": b"[1,]",
    "a leading zero": b"[01]",
    "deep": b"[" * 100_000,
    "no JSON": b"{nonsense",
}


def _outcome(parse: Callable[[bytes], Any], text: bytes) -> tuple[str, str]:
    try:
        return "value", repr(parse(text))  # as repr, which tells 0.0 from -0.0 and NaN from what it is not
    except (ValueError, RecursionError) as exc:
        return type(exc).__name__, str(exc)


@pytest.mark.parametrize("name", _TEXTS)
def test_a_text_is_read_as_pythons_parser_reads_it(name: str) -> None:
    assert _outcome(parse_json, _TEXTS[name]) == _outcome(json.loads, _TEXTS[name])


def test_any_number_is_read_as_pythons_parser_reads_it() -> None:
    rng = random.Random(7)
    for _ in range(300):
        numbers = [struct.unpack("<d", rng.randbytes(8))[0] for _ in range(20)]
        shorter = [-rng.expovariate(1) / 10 ** rng.randrange(5) for _ in range(20)]
        integers = [
            rng.choice((-1, 1)) * rng.getrandbits(rng.choice((8, 32, 60, 63, 64, 65, 80))) for _ in range(20)
        ]
        digits = ["".join(rng.choices("0123456789", k=rng.randrange(1, 60))) for _ in range(20)]
        floats = [f"{rng.randrange(10)}.{more}e{rng.randrange(-320, 300)}" for more in digits]
        for each in (numbers, shorter, integers):
            text = json.dumps(each, separators=(rng.choice((",", ", ")), ":")).encode()
            assert _outcome(parse_json, text) == _outcome(json.loads, text), text
        text = f"[{','.join(floats)}]".encode()
        assert _outcome(parse_json, text) == _outcome(json.loads, text), text


def test_a_line_as_gym_writes_it_is_read_by_the_fast_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(11)
    line = {
        "digest": "12345678901234567890123456789012",
        "generation_log_probs": [-rng.expovariate(1) / 10 ** rng.randrange(5) for _ in range(5_000)],
        "prompt_token_ids": [rng.randrange(2**32) for _ in range(5_000)],
        "version": 2**53,
    }
    text = json.dumps(line, separators=(",", ":")).encode()
    monkeypatch.setattr(exact_json, "json", None)
    assert parse_json(text) == line
