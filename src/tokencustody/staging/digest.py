"""The digests of worker staging: token encoding, chain hash, extras digest, and the digest of a staged call.

Wire format: staging schema 2, staging digest 2, extras digest 1 of the NeMo Gym token-capture protocols. Columns are
encoded whole, never token by token.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal

from tokencustody.columns import floats_of, ids_of, joined
from tokencustody.records import encode_uint64s, shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

STAGING_SCHEMA_VERSION: Literal[2] = 2
STAGING_DIGEST_VERSION: Literal[2] = 2
EXTRAS_DIGEST_VERSION: Literal[1] = 1

CALL_DOMAIN = b"nemo-gym-staging-call-v2"
CHAIN_DOMAIN = b"nemo-gym-staging-chain-v1"
EXTRAS_DOMAIN = b"nemo-gym-staging-extras-v1"
PREFIX_DOMAIN = b"nemo-gym-staging-prefix-v2"

_DIGEST = re.compile("[0-9a-f]{64}")
_SURROGATE = "UTF-8 cannot carry the text: surrogates not allowed"


def encode_token_ids(token_ids: Sequence[int] | Buffer) -> bytes:
    """Return the count, then each id, all as big-endian unsigned 64-bit integers.

    Raises ValueError for anything but integers from 0 to 2^64-1, plain ones or those of an array.
    """
    encoded = encode_uint64s(token_ids)
    return (len(encoded) // 8).to_bytes(8, "big") + encoded


def hash_token_ids(token_ids: Sequence[int] | Buffer) -> str:
    """Return the cumulative hash of a token sequence: SHA-256, lowercase hex. Raises as `encode_token_ids` does."""
    return hashlib.sha256(PREFIX_DOMAIN + encode_token_ids(token_ids)).hexdigest()


def compute_chain_hash(parent_chain_hash: str | None, token_ids_delta: Sequence[int] | Buffer) -> str:
    """Return the hash that commits a call to its delta and, by the parent's chain hash, to every delta before it.

    None is the parent of a root. Raises ValueError for a parent that is no lowercase SHA-256 hex.
    """
    link = b"\0" if parent_chain_hash is None else _present_digest(parent_chain_hash, "parent_chain_hash")
    return hashlib.sha256(CHAIN_DOMAIN + link + encode_token_ids(token_ids_delta)).hexdigest()


def compute_extras_digest(extras: Mapping[str, Any] | None) -> str:
    """Return the digest of a call's extras: None, or a mapping of JSON-compatible values.

    Raises TypeError for a value of another type (tuples, bytes, subclasses and numpy scalars among them) and
    ValueError for an integer outside the signed 64-bit range, a float that is not finite, text that UTF-8 cannot
    encode, or nesting too deep to walk.
    """
    if extras is not None and not isinstance(extras, Mapping):
        raise TypeError(f"extras must be a mapping or None, not {type(extras).__name__}")
    encoded = bytearray(EXTRAS_DOMAIN)
    encoded.append(EXTRAS_DIGEST_VERSION)
    try:
        _encode_extra(None if extras is None else dict(extras), encoded)
    except RecursionError:
        raise ValueError("extras are nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError(f"{_place_of_surrogate(extras)}: {_SURROGATE}") from None
    return hashlib.sha256(encoded).hexdigest()


def compute_staging_digest(
    *,
    schema_version: int,
    digest_version: int,
    extras_digest_version: int,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    delta_len: int,
    cum_len: int,
    weight_version: int,
    token_ids_delta: Sequence[int] | Buffer,
    token_mask_delta: Sequence[float] | Buffer,
    generation_log_probs_delta: Sequence[float] | Buffer,
    extras_digest: str,
    chain_hash: str,
    cumulative_hash: str,
) -> str:
    """Return the digest of one staged call: SHA-256 (lowercase hex) over its identity, position and columns.

    The mask is 1.0 for a sampled token and 0.0 for a prompt token, whose log probability is 0.0; log probabilities
    are natural logarithms, hashed as float32. Columns may be arrays, as for `StagedCallBaseSnapshot`. Raises ValueError
    when a value cannot be encoded or the parts disagree, and TypeError when an id or a hash is not text.
    """
    _check_version(schema_version, STAGING_SCHEMA_VERSION, "staging schema version")
    _check_version(digest_version, STAGING_DIGEST_VERSION, "staging digest version")
    _check_version(extras_digest_version, EXTRAS_DIGEST_VERSION, "extras digest version")
    if not rollout_id or not model_call_id:
        raise ValueError("rollout_id and model_call_id must not be empty")
    check_position(parent_call_id, prev_len, mode)
    check_lengths(prev_len, delta_len, cum_len)
    token_ids = ids_of(token_ids_delta, "token_ids_delta")
    mask = floats_of(token_mask_delta, "token_mask_delta")
    log_probs = floats_of(generation_log_probs_delta, "generation_log_probs_delta")
    if not delta_len == len(token_ids) == len(mask) == len(log_probs):
        raise ValueError(
            f"delta_len is {delta_len}, but the delta has {len(token_ids)} token ids, "
            f"{len(mask)} mask values and {len(log_probs)} log probabilities"
        )
    encoded_mask = _encode_float32s(mask, "token_mask_delta")
    encoded_log_probs = _encode_float32s(log_probs, "generation_log_probs_delta")
    _check_mask(mask, log_probs)
    for name, digest in (("chain_hash", chain_hash), ("cumulative_hash", cumulative_hash)):
        if not isinstance(digest, str):
            raise TypeError(f"{name} must be text, not {type(digest).__name__}")
    encoded = (
        CALL_DOMAIN,
        bytes((schema_version, digest_version, extras_digest_version)),
        _text(rollout_id, "rollout_id"),
        _text(model_call_id, "model_call_id"),
        b"\0" if parent_call_id is None else b"\1" + _text(parent_call_id, "parent_call_id"),
        _text(mode, "mode"),
        _uint64(prev_len, "prev_len"),
        _uint64(delta_len, "delta_len"),
        _uint64(cum_len, "cum_len"),
        _uint64(weight_version, "weight_version"),
        _sized(encode_token_ids(token_ids)),
        _sized(encoded_mask),
        _sized(encoded_log_probs),
        _digest(extras_digest, "extras_digest"),
        _present_digest(chain_hash, "chain_hash"),
        _present_digest(cumulative_hash, "cumulative_hash"),
    )
    return hashlib.sha256(b"".join(encoded)).hexdigest()


def build_staging_delta(
    *,
    prompt_token_ids: list[int] | Buffer,
    generated_token_ids: list[int] | Buffer,
    generated_log_probs: list[float] | Buffer,
    prev_len: int,
) -> tuple[list[int], list[float], list[float]]:
    """Return the ids, mask and log probabilities of what a call adds to the `prev_len` tokens before it.

    Ids and mask are an `array.array` each where ids are given as an array, log probabilities where they are. Raises
    ValueError when `prev_len` lies outside the prompt, the generated columns differ in length, or nothing is added.
    """
    prompt = ids_of(prompt_token_ids, "prompt_token_ids")
    generated = ids_of(generated_token_ids, "generated_token_ids")
    log_probs = floats_of(generated_log_probs, "generated_log_probs")
    if not 0 <= prev_len <= len(prompt):
        raise ValueError(f"prev_len {prev_len} lies outside the prompt of {len(prompt)} tokens")
    if len(generated) != len(log_probs):
        raise ValueError(f"{len(log_probs)} log probabilities for {len(generated)} generated tokens")
    carried = len(prompt) - prev_len
    token_ids = joined(prompt[prev_len:], generated, "token ids")
    if not token_ids:
        raise ValueError("the call adds no token to its prefix")
    mask = _repeated(0.0, carried, token_ids) + _repeated(1.0, len(generated), token_ids)
    return token_ids, mask, _repeated(0.0, carried, log_probs) + log_probs


def _repeated(value: float, count: int, like: Any) -> Any:
    """Return a column of one value, an array where `like` is one."""
    return array("d", [value]) * count if type(like) is array else [value] * count


def check_position(parent_call_id: str | None, prev_len: int, mode: str | None = None) -> None:
    """Raise ValueError unless a root starts at 0 and a child after its parent, each in the `mode` for it, if given."""
    if mode not in (None, "text", "token_in"):
        raise ValueError(f"unsupported capture mode {shown(mode)}")
    if parent_call_id == "":
        raise ValueError("parent_call_id must not be empty")
    if parent_call_id is None:
        if mode == "token_in" or prev_len != 0:
            raise ValueError("a call without a parent is a root in text mode with prev_len 0")
    elif mode == "text" or prev_len <= 0:
        raise ValueError("a call with a parent is in token_in mode with prev_len above 0")


def check_lengths(prev_len: int, delta_len: int, cum_len: int) -> None:
    """Raise ValueError unless the delta has tokens and ends where the call's whole sequence ends."""
    if delta_len == 0:
        raise ValueError("a staged delta has at least one token")
    if cum_len != prev_len + delta_len:
        raise ValueError(
            f"cum_len {shown(cum_len)} is not prev_len {shown(prev_len)} + delta_len {shown(delta_len)}"
        )


def check_exact_floats(values: Sequence[float], field: str) -> None:
    """Raise ValueError, naming `field`, unless every value is a Python float: not an integer, not a subclass.

    An array has nothing else.
    """
    if type(values) is not array and operator.countOf(map(type, values), float) != len(values):
        raise ValueError(f"{field}: every value must be a Python float")


def _check_mask(mask: Sequence[float], log_probs: Sequence[float]) -> None:
    if mask.count(0.0) + mask.count(1.0) != len(mask):
        raise ValueError("token_mask_delta: every value must be 0.0 or 1.0")
    if not all(compress(mask, log_probs)):
        raise ValueError("generation_log_probs_delta: a token with mask 0.0 must have log probability 0.0")


def _check_version(version: int, expected: int, name: str) -> None:
    if type(version) is not int or version != expected:
        raise ValueError(f"unsupported {name} {shown(version)}")


def _encode_float32s(values: Sequence[float], field: str) -> bytes:
    check_exact_floats(values, field)
    column = array("f", values)
    # A sum of such values stays far inside the float64 range, so it is finite exactly when each of them is.
    if not math.isfinite(sum(column)):
        raise ValueError(f"{field}: every value must be finite as float32")
    if sys.byteorder == "little":
        column.byteswap()
    return struct.pack(">Q", len(values)) + column.tobytes()


def _encode_extra(value: Any, encoded: bytearray) -> None:
    # Exact types: a subclass may change what its value means, and JSON would not bring it back.
    kind = type(value)
    if value is None:
        encoded += b"N"
    elif kind is bool:
        encoded += b"B\1" if value else b"B\0"
    elif kind is int:
        try:
            encoded += b"I" + value.to_bytes(8, "big", signed=True)
        except OverflowError:
            raise ValueError("extras: an integer lies outside the signed 64-bit range") from None
    elif kind is float:
        if not math.isfinite(value):
            raise ValueError("extras: every float must be finite")
        encoded += b"F" + struct.pack(">d", value)
    elif kind is str:
        encoded += b"S" + _sized(value.encode())
    elif kind is list:
        encoded += b"L" + len(value).to_bytes(8, "big")
        for item in value:
            _encode_extra(item, encoded)
    elif kind is dict:
        if not set(map(type, value)) <= {str}:
            raise TypeError("extras: every key must be text")
        encoded += b"D" + len(value).to_bytes(8, "big")
        for key in sorted(value, key=str.encode):
            encoded += _sized(key.encode())
            _encode_extra(value[key], encoded)
    else:
        raise TypeError(f"extras: {kind.__name__} is no JSON value")


def _place_of_surrogate(extras: Any) -> str:
    """Return where in extras a text lies that UTF-8 cannot encode."""
    waiting: list[tuple[str, Any]] = [("extras", extras)]
    # What stands in several places, or in itself, is looked at once.
    seen: set[int] = set()
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, list | Mapping):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            return place
        if isinstance(value, list):
            waiting += [(f"{place}[{number}]", item) for number, item in enumerate(value)]
        elif isinstance(value, Mapping):
            waiting += [(f"{place} key", key) for key in value]
            waiting += [(f"{place}[{key!r:.80}]", item) for key, item in value.items()]
    return "extras"


def _text(value: str, field: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{field} must be text, not {type(value).__name__}")
    try:
        return _sized(value.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{field}: {_SURROGATE}") from None


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


def _uint64(value: int, field: str) -> bytes:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{field} must be an integer from 0 to 2^64-1")
    return value.to_bytes(8, "big")


def _digest(value: str, field: str) -> bytes:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{field} must be a SHA-256 in lowercase hex")
    return bytes.fromhex(value)


def _present_digest(value: str, field: str) -> bytes:
    return b"\1" + _digest(value, field)


EMPTY_EXTRAS_DIGEST = compute_extras_digest(None)
