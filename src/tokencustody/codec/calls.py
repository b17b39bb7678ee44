"""The packed payload of one call: columns of numbers as bytes, everything else as JSON, exact in every bit.

Layout, codec version 1, all integers little-endian:

    byte 0      codec version (1)
    byte 1      width of a token id in bytes: 2, 4 or 8, the narrowest that fits the call
    byte 2      JSON dialect: 0 strict JSON, 1 with NaN, Infinity and integers beyond 64 bits, as Python prints them
    byte 3      0
    8 bytes     number of prompt ids
    8 bytes     number of generated ids, which is also the number of log probabilities
    then        prompt ids, generated ids, log probabilities (float64), and the other fields as one JSON object

Codec version 2 leaves out the first prompt ids, where they are the whole sequence of the parent call:

    bytes 0-3   as above, version 2; the width is still that of the whole call
    8 bytes     number of prompt ids that were left out
    8 bytes     number of the other prompt ids
    8 bytes     number of generated ids
    then        what version 1 has after the ids that were left out

JSON text knows one NaN: outside the log probabilities, which keep every bit, a NaN comes back without its sign and
payload bits. The SHA-256 of the version 1 bytes is the identity of the payload, in whichever form it is stored. The
JSON keeps the order in which the writer gave its keys, so what is read prints like what was written.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tokencustody.codec.exact_json import decode_json, encode_json
from tokencustody.codec.id_columns import PackedIds, decoded, little_endian
from tokencustody.columns import TYPECODES, narrowest, widened
from tokencustody.errors import CorruptEntryError, InvalidRecordError
from tokencustody.records import TOKEN_FIELDS, ParentResolutionStatus, TokenEntry, check_consistency

Entry = TypeVar("Entry", bound=BaseModel)

CODEC_VERSION = 1
# The form that leaves out the beginning of the prompt, which another call holds.
SHARED_CODEC_VERSION = 2

_HEADER = struct.Struct("<BBBxQQ")
_SHARED_HEADER = struct.Struct("<BBBxQQQ")
_MAX_COLUMN_INT = 2**63 - 1
# Of the arrays that `TokenEntry` makes of buffers.
_TYPECODES_OF = dict(zip(TOKEN_FIELDS, ("HIQ", "HIQ", "d"), strict=True))
_NO_TOKENS: dict[str, list[Any]] = {name: [] for name in TOKEN_FIELDS}


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """One call ready to be stored whole: its payload, the payload's SHA-256 (hex) and the width of its token ids.

    `length` counts the prompt's and the generated ids.
    """

    payload: bytes
    sha256: str
    token_width: int
    prompt_len: int
    length: int
    is_delta: bool

    def sequence(self) -> PackedIds:
        """Return the prompt and generated ids."""
        return PackedIds(
            self.token_width, self.payload[_HEADER.size : _HEADER.size + self.length * self.token_width]
        )

    def begins_with(self, ids: PackedIds) -> bool:
        """Return whether the prompt begins with these ids, which are packed no wider than they need."""
        if self.is_delta or len(ids) > self.prompt_len or ids.width > self.token_width:
            return False
        data = ids.data if ids.width == self.token_width else ids.at_width(self.token_width).tobytes()
        return self.payload.startswith(data, _HEADER.size)

    def check_prefix(self, length: int) -> None:
        """Raise ValueError when the prompt has no prefix of `length` ids."""
        if self.is_delta:
            raise ValueError("a delta prompt begins in its parent, not with a prefix of its own")
        if not 0 <= length <= self.prompt_len:
            raise ValueError(f"a prompt of {self.prompt_len} ids has no prefix of {length}")


@dataclass(frozen=True, slots=True)
class SharedPayload:
    """A payload without the ids that the parent call holds, and the SHA-256 (hex) of these bytes."""

    payload: bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A stored payload, proven by the hash of its bytes; its columns are decoded when they are asked for.

    `own_prompt_len` counts the prompt ids that were stored: all of them, or those after the `shared_len` ids which
    the call `fields["parent_call_id"]` holds (None: the payload is whole).
    """

    token_width: int
    dialect: int
    shared_len: int | None
    own_prompt_len: int
    generation_len: int
    fields: dict[str, Any]
    body: bytes

    @property
    def parent_call_id(self) -> str | None:
        """The exact id, where the audit column may be shortened."""
        parent: str | None = self.fields.get("parent_call_id")
        return parent

    @property
    def is_delta(self) -> bool:
        """Whether the writer gave a prompt without the parent's sequence, which stays so."""
        return bool(self.fields.get("prompt_is_delta"))

    def own_prompt(self) -> list[int]:
        """Return the prompt ids that were stored."""
        return decoded(TYPECODES[self.token_width], self.body, 0, self.own_prompt_len)

    def generation(self) -> list[int]:
        """Return the generated ids."""
        start = self.own_prompt_len * self.token_width
        return decoded(TYPECODES[self.token_width], self.body, start, self.generation_len)

    def generation_log_probs(self) -> list[float]:
        """Return the log probability of each generated id."""
        start = (self.own_prompt_len + self.generation_len) * self.token_width
        return decoded("d", self.body, start, self.generation_len)

    def own_ids(self) -> bytes:
        """Return the prompt and generated ids that were stored, packed."""
        return self.body[: (self.own_prompt_len + self.generation_len) * self.token_width]

    def packed_log_probs(self) -> bytes:
        """Return the log probability of each generated id, packed."""
        start = (self.own_prompt_len + self.generation_len) * self.token_width
        return self.body[start : start + 8 * self.generation_len]

    def whole_sha256(self, shared: array[int]) -> str:
        """Return the SHA-256 of the whole payload, given the ids left out, packed at the width of this call."""
        header = _HEADER.pack(
            CODEC_VERSION,
            self.token_width,
            self.dialect,
            len(shared) + self.own_prompt_len,
            self.generation_len,
        )
        hasher = hashlib.sha256(header)
        hasher.update(shared)
        hasher.update(self.body)
        return hasher.hexdigest()

    def entry(self, shared: list[int]) -> TokenEntry:
        """Return the entry, unchecked, given the prompt ids that were left out; it shares the integers of both."""
        prompt = self.own_prompt()
        columns = (shared + prompt if shared else prompt, self.generation(), self.generation_log_probs())
        return construct(TokenEntry, {**self.fields, **dict(zip(TOKEN_FIELDS, columns, strict=True))})


def validated(entry: TokenEntry) -> TokenEntry:
    """Return a checked copy of `entry`, whose fields may have been assigned since it was made.

    It shares the three columns, whose elements `pack_entry` looks at, once. Raises InvalidRecordError that names the
    field.
    """
    if not isinstance(entry, TokenEntry):
        raise InvalidRecordError(f"entry must be a TokenEntry, not {type(entry).__name__}")
    fields = fields_of(entry)
    columns = {name: fields.get(name) for name in TOKEN_FIELDS}
    if _is_packable(columns):
        checked = _checked({**fields, **_NO_TOKENS})
        checked.__dict__.update(columns)
        try:
            check_consistency(checked)
        except ValueError as exc:
            raise InvalidRecordError(str(exc)) from None
    else:
        checked = _checked(fields)
    for name in ("cum_len", "continuation_context_len", "fingerprint_version"):
        value = getattr(checked, name)
        if value is not None and not 0 <= value <= _MAX_COLUMN_INT:
            raise InvalidRecordError(f"{name} does not lie between 0 and 2^63-1")
    return checked


def _is_packable(columns: Mapping[str, Any]) -> bool:
    """Return whether packing refuses in these columns what is no number, so that nobody else has to look."""
    for name, column in columns.items():
        is_packed = type(column) is array and column.typecode in _TYPECODES_OF[name]
        if type(column) is not list and not is_packed:
            return False
    log_probs = columns["generation_log_probs"]
    # An array takes whatever can be made a float, such as True or an integer that no float holds.
    return type(log_probs) is array or set(map(type, log_probs)) <= {float}


def _checked(fields: dict[str, Any]) -> TokenEntry:
    try:
        return TokenEntry.model_validate(fields)
    except ValidationError as exc:
        raise InvalidRecordError(first_problem(exc)) from None


def pack_entry(entry: TokenEntry) -> PackedEntry:
    """Return the packed form of a validated entry, as a snapshot of its columns.

    An id True or False is packed as the 1 or 0 that it equals. Raises InvalidRecordError, naming the field, for an id
    that is no integer or lies outside 0 … 2^64-1, and for a value that would not come back from JSON as it was given
    (a tuple, bytes, a lone surrogate, a key that is no string).
    """
    try:
        prompt, generation = narrowest(entry.prompt_token_ids), narrowest(entry.generation_token_ids)
    except OverflowError:
        raise _out_of_range(entry) from None
    except TypeError:
        _checked(fields_of(entry))
        raise
    width = max(prompt.itemsize, generation.itemsize)
    fields = fields_of(entry)
    for name in TOKEN_FIELDS:
        del fields[name]
    dialect, text = encode_json(fields)
    payload = b"".join(
        (
            _HEADER.pack(CODEC_VERSION, width, dialect, len(prompt), len(generation)),
            little_endian(widened(prompt, width)),
            little_endian(widened(generation, width)),
            little_endian(array("d", entry.generation_log_probs)),
            text,
        )
    )
    sha256 = hashlib.sha256(payload).hexdigest()
    length = len(prompt) + len(generation)
    return PackedEntry(payload, sha256, width, len(prompt), length, entry.prompt_is_delta)


def without_prefix(packed: PackedEntry, shared_len: int) -> SharedPayload:
    """Return the form that leaves out the first `shared_len` prompt ids, the whole sequence of the parent.

    Raises ValueError when the prompt is shorter, and for a delta prompt, which begins in the parent.
    """
    packed.check_prefix(shared_len)
    _, width, dialect, prompt_len, generation_len = _HEADER.unpack_from(packed.payload)
    header = _SHARED_HEADER.pack(
        SHARED_CODEC_VERSION, width, dialect, shared_len, prompt_len - shared_len, generation_len
    )
    payload = header + packed.payload[_HEADER.size + shared_len * width :]
    return SharedPayload(payload, hashlib.sha256(payload).hexdigest())


def unpack_entry(payload: bytes, sha256: str, *, rollout_id: str, model_call_id: str) -> TokenEntry:
    """Return the entry that was packed and stored whole, proven by its hash and by the ids of its row.

    Raises CorruptEntryError that names the call.
    """
    call = read_call(payload, sha256, rollout_id=rollout_id, model_call_id=model_call_id)
    if call.shared_len is not None:
        raise CorruptEntryError(
            f"{call_name(rollout_id, model_call_id)}: the stored payload lacks the beginning of its prompt"
        )
    return call.entry([])


def read_call(payload: bytes, sha256: str, *, rollout_id: str, model_call_id: str) -> StoredCall:
    """Return a stored payload of either form, proven by the hash of its bytes and by the ids of its row.

    Raises CorruptEntryError that names the call.
    """
    if payload is None:
        raise CorruptEntryError(
            f"{call_name(rollout_id, model_call_id)}: the stored payload is missing; restore it from a backup"
        )
    if hashlib.sha256(payload).hexdigest() != sha256:
        raise CorruptEntryError(
            f"{call_name(rollout_id, model_call_id)}: the stored payload does not match its SHA-256; "
            "restore it from a backup"
        )
    try:
        # The hash proves that these are the bytes of a validated entry; validating again proves nothing more.
        call = _take_apart(payload)
        ids = call.fields["rollout_id"], call.fields["model_call_id"]
    except (ValueError, struct.error, KeyError, TypeError, RecursionError) as exc:
        raise CorruptEntryError(
            f"{call_name(rollout_id, model_call_id)}: the stored payload does not decode: {str(exc)[:200]}"
        ) from exc
    if ids != (rollout_id, model_call_id):
        raise CorruptEntryError(
            f"{call_name(rollout_id, model_call_id)}: the stored payload belongs to another call; "
            "the row was copied or edited"
        )
    return call


def call_name(rollout_id: str, model_call_id: str) -> str:
    """Return how an error names a call."""
    return f"model call {model_call_id} of rollout {rollout_id}"


def differing_fields(first: TokenEntry, second: TokenEntry) -> list[str]:
    """Return the names of the fields whose values are not the same in every bit, sorted.

    The order of keys does not count: a client that prints its record again may sort them.
    """
    one, other = fields_of(first), fields_of(second)
    return sorted(
        name
        for name in one.keys() | other.keys()
        if _in_bits(one.get(name, ...)) != _in_bits(other.get(name, ...))
    )


def _in_bits(value: Any) -> Any:
    match value:
        case float():
            return struct.pack("<d", value)  # two NaN are never equal, and 0.0 equals -0.0
        case list():
            return [_in_bits(item) for item in value]
        case dict():
            return {key: _in_bits(item) for key, item in value.items()}
        # Of a subclass, such as an enumeration's, JSON keeps the plain value.
        case str():
            return str.__str__(value)
        case bool():
            return bool, value
        case int():
            return int(value)
        case _:
            return type(value), value


def construct(model: type[Entry], fields: Mapping[str, Any]) -> Entry:
    """Return an unchecked instance of `model` that shares the values of `fields`, the unknown ones too."""
    declared = model.model_fields
    entry = model.model_construct(**{name: fields[name] for name in fields if name in declared})
    # Not as arguments: an unknown field may be called `cls`.
    if entry.model_extra is not None:
        entry.model_extra.update({name: fields[name] for name in fields if name not in declared})
    return entry


def first_problem(exc: ValidationError) -> str:
    """Return the first complaint of pydantic as "field: message", without the value."""
    problem = exc.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def fields_of(entry: TokenEntry) -> dict[str, Any]:
    """Return what dict(entry) does, ten times as fast."""
    return {**entry.__dict__, **(entry.model_extra or {})}


def _out_of_range(entry: TokenEntry) -> InvalidRecordError:
    names = ("prompt_token_ids", "generation_token_ids")
    name = next(name for name in names if not all(0 <= token < 1 << 64 for token in getattr(entry, name)))
    return InvalidRecordError(f"{name}: every id must lie between 0 and 2^64-1")


def _take_apart(payload: bytes) -> StoredCall:
    shared_len: int | None = None
    if payload[:1] == bytes((SHARED_CODEC_VERSION,)):
        header = _SHARED_HEADER
        _, width, dialect, shared_len, own_prompt_len, generation_len = header.unpack_from(payload)
    else:
        header = _HEADER
        version, width, dialect, own_prompt_len, generation_len = header.unpack_from(payload)
        if version != CODEC_VERSION:
            raise ValueError(
                f"payload codec {version} is not {CODEC_VERSION} or {SHARED_CODEC_VERSION}, those this library reads"
            )
    if width not in TYPECODES:
        raise ValueError(f"token ids of {width} bytes")
    if payload[3]:
        raise ValueError(f"byte 3 of the header is {payload[3]}, not 0")
    body = payload[header.size :]
    text_at = (own_prompt_len + generation_len) * width + generation_len * 8
    if text_at > len(body):
        raise ValueError("the payload ends inside a column")
    fields = decode_json(dialect, body[text_at:])
    if fields["parent_resolution"] is not None:
        fields["parent_resolution"] = ParentResolutionStatus(fields["parent_resolution"])
    # What rebuilding goes by; a faulty writer may have stored anything with the right hash.
    for name, kind in (("parent_call_id", str | None), ("cum_len", int | None)):
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is of another type")
    return StoredCall(width, dialect, shared_len, own_prompt_len, generation_len, fields, body)
