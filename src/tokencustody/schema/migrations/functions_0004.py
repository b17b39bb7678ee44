"""The PostgreSQL functions of revision 0004, which decode packed columns into arrays, exact in every bit.

They run with the rights of the caller, so whoever may not read `payload` may not decode it, and find their tables in
the schema in which they were created, whatever the caller's search_path says. What they return is proven by the
SHA-256 that its row was stored with; what is not so proven is an error that names the call. A call that is not there
gives NULL. The one thing that a `double precision` of PostgreSQL does not keep is which NaN it was.

The layouts are those of `codec.calls` and `codec.staged`. A later revision that changes a function brings its own
module, and this one stays what it was when it was released.
"""

# ruff: noqa: S608 - SQL put together from constants of this module
from __future__ import annotations

from typing import NamedTuple

_CALL = "run text, rollout_id text, model_call_id text"
_ONE_CALL = "c.run = $1 AND c.rollout_id = $2 AND c.model_call_id = $3"


class _Function(NamedTuple):
    arguments: str
    result: str
    language: str
    body: str


_UINT64 = _Function(
    "data bytea, place integer",
    "bigint",
    "sql IMMUTABLE",
    "SELECT sum(get_byte($1, $2 + i)::bigint << 8 * i)::bigint FROM generate_series(0, 7) AS i",
)

_UINT64_BYTES = _Function(
    "number bigint",
    "bytea",
    "sql IMMUTABLE",
    "SELECT string_agg(substring(int8send($1) FROM i FOR 1), '' ORDER BY i DESC) FROM generate_series(1, 8) AS i",
)

_LOW_HALF = (
    "get_byte($1, at) + get_byte($1, at + 1) * 256 + get_byte($1, at + 2) * 65536"
    " + get_byte($1, at + 3)::bigint * 16777216"
)

_IDS = _Function(
    "data bytea, width integer",
    "numeric[]",
    "sql IMMUTABLE",
    f"""
SELECT coalesce(array_agg(
         CASE $2
           WHEN 2 THEN (get_byte($1, at) + get_byte($1, at + 1) * 256)::numeric
           WHEN 4 THEN ({_LOW_HALF})::numeric
           ELSE ({_LOW_HALF})::numeric + 4294967296 * ({_LOW_HALF.replace("at", "at + 4")})::numeric
         END ORDER BY at), '{{}}')
  FROM generate_series(0, octet_length($1) - 1, $2) AS at""",
)

# A sign, 11 bits of exponent and 52 of fraction. Each product is exact, for one of its factors is a power of two.
_DOUBLES = _Function(
    "data bytea",
    "double precision[]",
    "sql IMMUTABLE",
    f"""
SELECT coalesce(array_agg(
         CASE WHEN exponent = 2047 AND fraction <> 0 THEN 'NaN'
              WHEN exponent = 2047 THEN sign * 'Infinity'::double precision
              WHEN exponent = 0 THEN sign * (fraction::double precision * power(2::double precision, -1074))
              ELSE sign * ((fraction + 4503599627370496)::double precision
                           * power(2::double precision, exponent - 1075))
         END ORDER BY at), '{{}}')
  FROM (SELECT at,
               CASE WHEN get_byte($1, at + 7) < 128 THEN 1 ELSE -1 END::double precision AS sign,
               (get_byte($1, at + 7) & 127) * 16 + get_byte($1, at + 6) / 16 AS exponent,
               {_LOW_HALF} + get_byte($1, at + 4)::bigint * 4294967296
                 + get_byte($1, at + 5)::bigint * 1099511627776
                 + (get_byte($1, at + 6) & 15)::bigint * 281474976710656 AS fraction
          FROM generate_series(0, octet_length($1) - 1, 8) AS at) AS bits""",
)

# The highest byte of a float64 that is 0.0, 1.0 or -0.0.
_MASK = _Function(
    "data bytea",
    "double precision[]",
    "sql IMMUTABLE",
    """
SELECT coalesce(array_agg(
         CASE get_byte($1, at) WHEN 0 THEN '0'::double precision WHEN 63 THEN '1'::double precision
                               WHEN 128 THEN '-0'::double precision END ORDER BY at), '{}')
  FROM generate_series(0, octet_length($1) - 1) AS at""",
)

_WIDENED = _Function(
    "data bytea, width integer, wanted integer",
    "bytea",
    "sql IMMUTABLE",
    """
SELECT CASE WHEN $2 = $3 THEN $1 ELSE
         (SELECT coalesce(string_agg(substring($1 FROM at FOR $2) || decode(repeat('00', $3 - $2), 'hex'), ''
                                     ORDER BY at), '')
            FROM generate_series(1, octet_length($1), $2) AS at) END""",
)


def _proven(table: str, sha256: str, versions: str, call: str) -> str:
    return f"""
#variable_conflict use_column
DECLARE
  held record;
BEGIN
  SELECT c.payload, {sha256} AS expected INTO held FROM {table} AS c WHERE {_ONE_CALL};
  IF NOT FOUND THEN
    RETURN NULL;
  END IF;
  IF encode(sha256(held.payload), 'hex') <> held.expected THEN
    RAISE EXCEPTION '{call} % of rollout % (run %): the stored payload does not match its SHA-256; '
      'restore it from a backup', $3, $2, $1 USING ERRCODE = 'data_corrupted';
  END IF;
  IF get_byte(held.payload, 0) NOT IN ({versions}) THEN
    RAISE EXCEPTION '{call} % of rollout % (run %): the stored payload does not decode: its codec is newer than this '
      'function', $3, $2, $1 USING ERRCODE = 'data_corrupted';
  END IF;
  RETURN held.payload;
END"""


_STORED_PAYLOAD = _Function(
    _CALL,
    "bytea",
    "plpgsql STABLE",
    _proven("entries", "coalesce(c.stored_sha256, c.payload_sha256)", "1, 2", "model call"),
)

# The ids that a call left out are those that the calls above it added, from the first that was stored whole.
_WHOLE_PAYLOAD = _Function(
    _CALL,
    "bytea",
    "plpgsql STABLE",
    f"""
#variable_conflict use_column
DECLARE
  stored bytea := audit_stored_payload($1, $2, $3);
  wanted integer;
  shared bytea;
  whole bytea;
BEGIN
  IF stored IS NULL OR get_byte(stored, 0) = 1 THEN
    RETURN stored;
  END IF;
  wanted := get_byte(stored, 1);
  WITH RECURSIVE chain (parent_call_id, passed) AS (
    SELECT c.parent_call_id, ARRAY[c.model_call_id] FROM entries AS c WHERE {_ONE_CALL}
    UNION ALL
    SELECT CASE WHEN p.shared_len > 0 OR p.prompt_is_delta THEN p.parent_call_id END, c.passed || p.model_call_id
      FROM chain AS c
      JOIN entries AS p ON p.run = $1 AND p.rollout_id = $2 AND p.model_call_id = c.parent_call_id
     WHERE p.model_call_id <> ALL (c.passed)
  ), above AS (
    SELECT cardinality(passed) AS place, audit_stored_payload($1, $2, passed[cardinality(passed)]) AS data
      FROM chain WHERE cardinality(passed) > 1
  )
  SELECT string_agg(audit_widened_ids(audit_own_ids(data), get_byte(data, 1), wanted), '' ORDER BY place DESC)
    INTO shared FROM above WHERE get_byte(data, 1) <= wanted;
  whole := '\\x01'::bytea || substring(stored FROM 2 FOR 3)
    || audit_uint64_bytes(audit_uint64(stored, 4) + audit_uint64(stored, 12)) || substring(stored FROM 21 FOR 8)
    || coalesce(shared, '') || substring(stored FROM 29);
  IF encode(sha256(whole), 'hex') IS DISTINCT FROM (SELECT c.payload_sha256 FROM entries AS c WHERE {_ONE_CALL}) THEN
    RAISE EXCEPTION 'model call % of rollout % (run %): its prompt cannot be rebuilt, for the calls in which it began '
      'are missing or not the ones that it continued; restore the rollout from a backup', $3, $2, $1
      USING ERRCODE = 'data_corrupted';
  END IF;
  RETURN whole;
END""",
)

# Of either codec: where the counts of own prompt ids and of generated ids stand, and where the header ends.
_HEADER = "CASE get_byte(data, 0) WHEN 1 THEN 20 ELSE 28 END"

_OWN_IDS = _Function(
    "data bytea",
    "bytea",
    "sql IMMUTABLE",
    f"""
SELECT substring($1 FROM h.size + 1 FOR get_byte($1, 1)
                 * (audit_uint64($1, h.size - 16) + audit_uint64($1, h.size - 8))::integer)
  FROM (SELECT {_HEADER} AS size) AS h""",
)

# OFFSET 0 keeps the planner from computing the payload once for each time that it is named.
_PARTS = f"""
  FROM (SELECT data, get_byte(data, 1) AS width, {_HEADER} AS size,
               audit_uint64(data, {_HEADER} - 16)::integer AS prompt,
               audit_uint64(data, {_HEADER} - 8)::integer AS generated
          FROM (SELECT {{}}($1, $2, $3) AS data OFFSET 0) AS payload
         WHERE data IS NOT NULL OFFSET 0) AS p"""

_PROMPT_TOKEN_IDS = _Function(
    _CALL,
    "numeric[]",
    "sql STABLE",
    "\nSELECT audit_decoded_ids(substring(data FROM size + 1 FOR width * prompt), width)"
    + _PARTS.format("audit_whole_payload"),
)

_GENERATION_TOKEN_IDS = _Function(
    _CALL,
    "numeric[]",
    "sql STABLE",
    "\nSELECT audit_decoded_ids(substring(data FROM size + 1 + width * prompt FOR width * generated), width)"
    + _PARTS.format("audit_stored_payload"),
)

_GENERATION_LOG_PROBS = _Function(
    _CALL,
    "double precision[]",
    "sql STABLE",
    "\nSELECT audit_decoded_doubles(substring(data FROM size + 1 + width * (prompt + generated) FOR 8 * generated))"
    + _PARTS.format("audit_stored_payload"),
)

_STAGED_PAYLOAD = _Function(
    _CALL, "bytea", "plpgsql STABLE", _proven("staged_calls", "c.payload_sha256", "1", "staged call")
)

_STAGED_PARTS = """
  FROM (SELECT data, get_byte(data, 1) AS width, audit_uint64(data, 8)::integer AS tokens
          FROM (SELECT audit_staged_payload($1, $2, $3) AS data OFFSET 0) AS payload
         WHERE data IS NOT NULL OFFSET 0) AS p"""

_STAGED_TOKEN_IDS = _Function(
    _CALL,
    "numeric[]",
    "sql STABLE",
    "\nSELECT audit_decoded_ids(substring(data FROM 17 FOR width * tokens), width)" + _STAGED_PARTS,
)

_STAGED_LOG_PROBS = _Function(
    _CALL,
    "double precision[]",
    "sql STABLE",
    "\nSELECT audit_decoded_doubles(substring(data FROM 17 + width * tokens FOR 8 * tokens))" + _STAGED_PARTS,
)

_STAGED_TOKEN_MASK = _Function(
    _CALL,
    "double precision[]",
    "sql STABLE",
    "\nSELECT audit_decoded_mask(substring(data FROM 17 + (width + 8) * tokens FOR tokens))" + _STAGED_PARTS,
)

# In an order in which they can be created.
_FUNCTIONS = {
    "audit_uint64": _UINT64,
    "audit_uint64_bytes": _UINT64_BYTES,
    "audit_decoded_ids": _IDS,
    "audit_decoded_doubles": _DOUBLES,
    "audit_decoded_mask": _MASK,
    "audit_widened_ids": _WIDENED,
    "audit_own_ids": _OWN_IDS,
    "audit_stored_payload": _STORED_PAYLOAD,
    "audit_whole_payload": _WHOLE_PAYLOAD,
    "audit_prompt_token_ids": _PROMPT_TOKEN_IDS,
    "audit_generation_token_ids": _GENERATION_TOKEN_IDS,
    "audit_generation_log_probs": _GENERATION_LOG_PROBS,
    "audit_staged_payload": _STAGED_PAYLOAD,
    "audit_staged_token_ids": _STAGED_TOKEN_IDS,
    "audit_staged_log_probs": _STAGED_LOG_PROBS,
    "audit_staged_token_mask": _STAGED_TOKEN_MASK,
}

# The schema has a name only when the database is there, so the name is put in by the server.
PIN_SEARCH_PATH = f"""DO $do$
DECLARE
  function regprocedure;
BEGIN
  FOR function IN SELECT p.oid FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
    WHERE n.nspname = current_schema() AND p.proname IN ({", ".join(map(repr, _FUNCTIONS))})
  LOOP
    EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', function, current_schema());
  END LOOP;
END
$do$"""


def functions() -> dict[str, str]:
    """Return each function's name with its body."""
    return {name: function.body for name, function in _FUNCTIONS.items()}


def creations() -> list[str]:
    """Return the statements that create the functions."""
    return [
        f"CREATE FUNCTION {name}({each.arguments}) RETURNS {each.result} LANGUAGE {each.language} STRICT PARALLEL SAFE"
        f" AS $function${each.body}\n$function$"
        for name, each in _FUNCTIONS.items()
    ]


def removals() -> list[str]:
    """Return the statements that drop the functions, in an order in which they can be dropped."""
    return [f"DROP FUNCTION {name}" for name in reversed(_FUNCTIONS)]
