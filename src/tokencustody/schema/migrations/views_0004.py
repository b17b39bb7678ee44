"""The views of revision 0004: one text for both databases, with the few words in which they differ.

`schema.migrate.check` compares a database with these texts. A later revision that changes a view brings its own module,
and this one stays what it was when it was released.

Every view reads the rows of one rollout by the keys of its tables: no DISTINCT, window or grouping stands between
the view's `run` and `rollout_id` and those of a table. What is counted is a scalar subquery, computed only where it is
selected.
"""

# ruff: noqa: S608 - SQL put together from constants of this module
from __future__ import annotations

# Where the databases differ.
_WORDS = {
    "sqlite": {
        "bytes": "length",
        "join": "group_concat",
        # Else SQLite, which takes a walk for long, would read the whole table into a filter first.
        "short": "WHERE likelihood(b.depth >= 0, 0.00001)",
        "integer": "INTEGER",
        # SQLite itself computes no hash; `tokencustody sql` puts a view of the same name over this one.
        "sha256": "CAST(NULL AS TEXT)",
    },
    "postgresql": {
        "bytes": "octet_length",
        "join": "string_agg",
        "short": "",
        "integer": "bigint",
        "sha256": "encode(sha256({}), 'hex')",
    },
}

_NAMES = (
    "audit_incomplete",
    "audit_rollouts",
    "audit_calls",
    "audit_intents",
    "audit_conflicts",
    "audit_versions",
    "audit_lineage",
    "audit_ledger",
    "audit_staging",
    "audit_integrity",
    "audit_exports",
)

_OF_ROLLOUT = "{0}.run = {1}.run AND {0}.rollout_id = {1}.rollout_id"
_OF_CALL = _OF_ROLLOUT + " AND {0}.model_call_id = {1}.model_call_id"

# Why a rollout is masked as a whole, with the columns of `audit_incomplete`. `{{of_rollout}}` stands for a condition on
# `x` that every part must have for itself: SQLite pushes none into a union.
_REASONS = f"""
SELECT x.run, x.rollout_id, x.kind AS reason, x.model_call_id, x.differing_fields AS detail, true AS masks_rollout,
       x.recorded_at AS since, x.written_by, x.version
  FROM failures AS x
 WHERE {{of_rollout}}
UNION ALL
SELECT x.run, x.rollout_id, 'dangling_intent', x.model_call_id, '', true, x.begun_at, x.written_by,
       CAST(NULL AS {{integer}})
  FROM intents AS x JOIN fences AS g ON {_OF_ROLLOUT.format("g", "x")}
 WHERE {{of_rollout}} AND g.state = 'frozen' AND x.refusal_code IS NULL
   AND NOT EXISTS (SELECT 1 FROM entries AS e WHERE {_OF_CALL.format("e", "x")})
UNION ALL
SELECT x.run, x.rollout_id, x.event, x.model_call_id, '', true, x.recorded_at, x.written_by, x.version
  FROM snapshot_versions AS x JOIN fences AS g ON {_OF_ROLLOUT.format("g", "x")}
 WHERE {{of_rollout}} AND g.state = 'retired' AND x.event IN ('mark', 'conflict')
   AND NOT EXISTS (SELECT 1 FROM failures AS y WHERE {_OF_ROLLOUT.format("y", "x")})
UNION ALL
SELECT x.run, x.rollout_id, 'dangling_intent', '', '', true, x.frozen_at, '', CAST(NULL AS {{integer}})
  FROM fences AS x
 WHERE {{of_rollout}} AND x.state = 'retired' AND x.incomplete
   AND NOT EXISTS (SELECT 1 FROM failures AS y WHERE {_OF_ROLLOUT.format("y", "x")})
   AND NOT EXISTS (SELECT 1 FROM snapshot_versions AS y
                    WHERE {_OF_ROLLOUT.format("y", "x")} AND y.event IN ('mark', 'conflict'))
"""

_INCOMPLETE = f"""
{_REASONS.replace("{of_rollout} AND ", "").replace(" WHERE {of_rollout}", "")}
UNION ALL
SELECT x.run, x.rollout_id, 'unresolved_parent', x.model_call_id, x.parent_resolution_reason, false, x.committed_at,
       x.written_by, CAST(NULL AS {{integer}})
  FROM entries AS x
 WHERE x.parent_resolution = 'unresolved'
UNION ALL
SELECT x.run, x.rollout_id, 'ledger_failure', x.model_call_id, x.reason, false, x.recorded_at, x.written_by,
       CAST(NULL AS {{integer}})
  FROM ledger_failures AS x
UNION ALL
SELECT x.run, x.rollout_id, 'ledger_failure', x.model_call_id,
       CASE WHEN coalesce(x.response_id, '') = '' THEN 'ledger_row_missing_response_id'
            ELSE 'ledger_row_missing_chain_hash' END,
       false, x.committed_at, x.written_by, CAST(NULL AS {{integer}})
  FROM ledger_calls AS x
 WHERE coalesce(x.response_id, '') = '' OR coalesce(x.chain_hash, '') = ''
"""

_THIS = _OF_ROLLOUT.format("x", "f")
# What a payload stored without its prompt's beginning leaves out, less the header that is 8 bytes longer.
_LEFT_OUT = "CASE WHEN {0}.shared_len > 0 THEN {0}.shared_len * {0}.token_width - 8 ELSE 0 END"


def _count(table: str, condition: str = "") -> str:
    return f"(SELECT count(*) FROM {table} AS x WHERE {_THIS}{condition})"


def _sum(what: str) -> str:
    return f"(SELECT CAST(coalesce(sum({what}), 0) AS {{integer}}) FROM entries AS x WHERE {_THIS})"


_ROLLOUTS = f"""
SELECT f.run, f.rollout_id, f.state, f.version, f.snapshot_id, f.incomplete,
       coalesce((SELECT {{join}}(y.words, '; ')
          FROM (SELECT x.reason || CASE WHEN x.model_call_id = '' THEN '' ELSE ' ' || x.model_call_id END
                       || CASE WHEN x.detail = '' THEN '' ELSE ' (' || x.detail || ')' END
                       || CASE WHEN count(*) = 1 THEN '' ELSE ' x' || count(*) END AS words
                  FROM ({_REASONS.replace("{of_rollout}", _THIS)}) AS x
                 GROUP BY x.reason, x.model_call_id, x.detail
                 ORDER BY coalesce(min(x.version), 9223372036854775807), min(x.since), x.model_call_id) AS y), '')
         AS why,
       {_count("entries")} AS calls,
       {_sum("x.prompt_len")} AS prompt_tokens,
       {_sum("x.generation_len")} AS generated_tokens,
       {_sum("{bytes}(x.payload)")} AS stored_bytes,
       {_sum("{bytes}(x.payload) + " + _LEFT_OUT.format("x"))} AS whole_bytes,
       {_count("intents")} AS intents,
       CASE WHEN f.state = 'open' THEN
         (SELECT count(*) FROM intents AS x
           WHERE {_THIS} AND x.refusal_code IS NULL
             AND NOT EXISTS (SELECT 1 FROM entries AS e WHERE {_OF_CALL.format("e", "x")}))
       ELSE 0 END AS pending_intents,
       {_count("ledger_calls")} AS ledger_calls,
       {_count("ledger_failures")} AS ledger_failures,
       f.opened_at, f.frozen_at, f.retired_at,
       CASE WHEN f.state = 'retired' THEN
         (SELECT max(x.event) FROM snapshot_versions AS x WHERE {_THIS} AND x.event IN ('drop', 'retire'))
       END AS retired_by,
       {_count("exports")} AS exports,
       (SELECT max(x.exported_at) FROM exports AS x WHERE {_THIS}) AS exported_at
  FROM fences AS f
"""

_CALLS = f"""
SELECT e.run, e.rollout_id, e.model_call_id, e.model, e.response_id, e.prompt_len, e.generation_len, e.cum_len,
       e.token_width, e.digest, e.parent_call_id, e.parent_resolution, e.parent_resolution_reason, e.prompt_is_delta,
       e.continuation_fingerprint, e.continuation_context_len, e.continuation_context_digest, e.fingerprint_version,
       e.created_at, e.committed_at, e.written_by, e.payload_sha256, e.shared_len, e.stored_sha256,
       {{bytes}}(e.payload) AS stored_bytes,
       {{bytes}}(e.payload) + {_LEFT_OUT.format("e")} AS whole_bytes
  FROM entries AS e
"""

_INTENTS = f"""
SELECT i.run, i.rollout_id, i.model_call_id,
       CASE WHEN i.refusal_code IS NOT NULL THEN 'refused'
            WHEN e.model_call_id IS NOT NULL THEN 'stored'
            WHEN f.state = 'open' THEN 'pending'
            ELSE 'dangling' END AS state,
       i.refusal_code, i.begun_at, i.refused_at, e.committed_at AS stored_at, i.written_by, e.written_by AS stored_by
  FROM intents AS i
  JOIN fences AS f ON {_OF_ROLLOUT.format("f", "i")}
  LEFT JOIN entries AS e ON {_OF_CALL.format("e", "i")}
"""

_CONFLICTS = f"""
SELECT x.run, x.rollout_id, x.version, x.kind, x.model_call_id, x.first_payload_sha256, x.second_payload_sha256,
       x.differing_fields,
       CASE WHEN x.kind = 'conflict' THEN e.written_by ELSE i.written_by END AS first_written_by,
       CASE WHEN x.kind = 'conflict' THEN e.committed_at ELSE i.refused_at END AS first_written_at,
       x.written_by AS second_written_by, x.recorded_at
  FROM failures AS x
  LEFT JOIN entries AS e ON {_OF_CALL.format("e", "x")}
  LEFT JOIN intents AS i ON {_OF_CALL.format("i", "x")}
 WHERE x.kind IN ('conflict', 'refusal_conflict')
"""

_VERSIONS = f"""
SELECT v.run, v.rollout_id, v.version, v.event, v.model_call_id, v.snapshot_id, v.recorded_at, v.written_by,
       v.event_id, v.sealed_sha256, x.kind AS failure_kind
  FROM snapshot_versions AS v
  LEFT JOIN failures AS x ON {_OF_ROLLOUT.format("x", "v")} AND x.version = v.version
"""

# From the tops down, so that no walk can run in a circle: each call names one parent and is reached at most once. What
# is not reached is in a circle or hangs from one.
_BELOW_TOPS = f"""
WITH RECURSIVE below (model_call_id, depth, root_call_id, path, ending, missing_call_id) AS (
  SELECT c.model_call_id, CAST(0 AS {{integer}}), c.model_call_id, c.model_call_id,
         CASE WHEN c.parent_call_id IS NULL THEN 'root' ELSE 'missing' END, c.parent_call_id
    FROM entries AS c
   WHERE {_OF_ROLLOUT.format("c", "f")}
     AND (c.parent_call_id IS NULL
          OR NOT EXISTS (SELECT 1 FROM entries AS p
                          WHERE {_OF_ROLLOUT.format("p", "f")} AND p.model_call_id = c.parent_call_id))
  UNION ALL
  SELECT c.model_call_id, b.depth + 1, b.root_call_id, b.path || ' > ' || c.model_call_id, b.ending, b.missing_call_id
    FROM below AS b JOIN entries AS c ON {_OF_ROLLOUT.format("c", "f")} AND c.parent_call_id = b.model_call_id
  {{short}}
)
"""

_LINEAGE_COLUMNS = """e.model_call_id, e.parent_call_id, e.parent_resolution, e.prompt_len, e.generation_len,
       e.cum_len, e.committed_at"""

_LINEAGE = {
    # SQLite keeps the order of a CROSS JOIN, and would walk again for each row that is joined to the walk itself: so a
    # rollout is walked through once.
    "sqlite": f"""
SELECT f.run, f.rollout_id, {_LINEAGE_COLUMNS},
       json_extract(t.value, '$[1]') AS depth, json_extract(t.value, '$[2]') AS root_call_id,
       json_extract(t.value, '$[3]') AS path, json_extract(t.value, '$[4]') AS ending,
       json_extract(t.value, '$[5]') AS missing_call_id
  FROM fences AS f
 CROSS JOIN json_each(({_BELOW_TOPS}
         SELECT json_group_array(json_array(c.model_call_id, c.depth, c.root_call_id, c.path, c.ending,
                                            c.missing_call_id))
           FROM (SELECT b.model_call_id, max(b.depth) AS depth, max(b.root_call_id) AS root_call_id,
                        max(b.path) AS path, coalesce(max(b.ending), 'circle') AS ending,
                        max(b.missing_call_id) AS missing_call_id
                   FROM (SELECT * FROM below
                          UNION ALL
                         SELECT e.model_call_id, NULL, NULL, NULL, NULL, NULL FROM entries AS e
                          WHERE {_OF_ROLLOUT.format("e", "f")}) AS b
                  GROUP BY b.model_call_id) AS c)) AS t
 CROSS JOIN entries AS e ON {_OF_ROLLOUT.format("e", "f")} AND e.model_call_id = json_extract(t.value, '$[0]')
""",
    "postgresql": f"""
SELECT f.run, f.rollout_id, t.*
  FROM fences AS f
 CROSS JOIN LATERAL ({_BELOW_TOPS}
         SELECT {_LINEAGE_COLUMNS},
                b.depth, b.root_call_id, b.path, coalesce(b.ending, 'circle') AS ending, b.missing_call_id
           FROM entries AS e LEFT JOIN below AS b ON b.model_call_id = e.model_call_id
          WHERE {_OF_ROLLOUT.format("e", "f")}) AS t
""",
}

_LEDGER = """
SELECT c.run, c.rollout_id, c.position, 'call' AS kind, c.model_call_id, CAST(NULL AS text) AS reason,
       c.parent_call_id, c.mode, c.prev_len, c.delta_len, c.cum_len, c.weight_version, c.staging_key, c.capture_key,
       c.response_id, c.digest, c.extras_digest, c.chain_hash, c.cumulative_hash, c.output_fingerprint,
       c.continuation_fingerprint, c.fingerprint_version, c.continuation_context_len, c.continuation_context_digest,
       c.staging_chain, c.admitted_at, c.committed_at, c.written_by, c.payload_sha256, c.row_sha256
  FROM ledger_calls AS c
UNION ALL
SELECT c.run, c.rollout_id, c.position, 'failure', c.model_call_id, c.reason,
       NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, c.recorded_at, c.written_by, NULL, c.row_sha256
  FROM ledger_failures AS c
"""

_ATTACHMENTS = f"FROM staged_attachments AS a WHERE {_OF_CALL.format('a', 's')}"

# Counted, for PostgreSQL would answer NOT EXISTS, in a column, from a hash of the whole ledger.
_STAGING = f"""
SELECT s.run, s.rollout_id, s.model_call_id, s.parent_call_id, s.mode, s.prev_len, s.delta_len, s.cum_len,
       s.weight_version, s.digest, s.extras_digest, s.chain_hash, s.cumulative_hash, s.token_width, s.staged_at,
       s.written_by, s.payload_sha256, {{bytes}}(s.payload) AS payload_bytes,
       coalesce({{bytes}}(s.extras), 0) AS extras_bytes,
       (SELECT count(*) {_ATTACHMENTS}) AS attachments,
       (SELECT CAST(coalesce(sum({{bytes}}(a.data)), 0) AS {{integer}}) {_ATTACHMENTS}) AS attachment_bytes,
       (f.state IS NULL OR f.state <> 'open')
         AND (SELECT count(*) FROM ledger_calls AS c
               WHERE {_OF_ROLLOUT.format("c", "s")}
                 AND c.staging_key = s.rollout_id || '/' || s.model_call_id) = 0 AS is_orphan
  FROM staged_calls AS s
  LEFT JOIN fences AS f ON {_OF_ROLLOUT.format("f", "s")}
"""

_EXPORTS = f"""
SELECT x.run, x.rollout_id, x.export_id, x.snapshot_id, x.version, x.destination, x.manifest_sha256, x.exported_at,
       x.written_by,
       -- Retirement is one more version.
       coalesce(x.snapshot_id = f.snapshot_id
                AND x.version = f.version - CASE f.state WHEN 'retired' THEN 1 ELSE 0 END, false) AS is_current
  FROM exports AS x
  JOIN fences AS f ON {_OF_ROLLOUT.format("f", "x")}
"""

# PostgreSQL rewords what it is given. A comment on each view keeps the hash of that wording, for `migrate.check`,
# and the release of the server, for another one may word the same view otherwise.
RELEASE = "'tokencustody ' || current_setting('server_version_num')::integer / 10000"
KEEP_DEFINITIONS = f"""DO $do$
DECLARE
  held record;
BEGIN
  FOR held IN SELECT c.oid, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relname IN ({", ".join(map(repr, _NAMES))})
  LOOP
    EXECUTE format('COMMENT ON VIEW %I IS %L', held.relname,
      {RELEASE} || ' ' || md5(pg_get_viewdef(held.oid)));
  END LOOP;
END
$do$"""


def integrity(sha256: str) -> str:
    """Return the SELECT of `audit_integrity`; `sha256` computes the hash, in hex, of what stands for {}."""
    parts = (
        ("call", "''", "coalesce(x.stored_sha256, x.payload_sha256)", "x.payload", "entries"),
        ("staged_call", "''", "x.payload_sha256", "x.payload", "staged_calls"),
        ("attachment", "x.name", "x.data_sha256", "x.data", "staged_attachments"),
    )
    return "UNION ALL".join(
        f"\nSELECT x.run, x.rollout_id, x.model_call_id, '{kind}' AS kind, {name} AS name,"
        f" {stored} AS stored_sha256,\n       {sha256.format(data)} AS recomputed_sha256,"
        f" {stored} = {sha256.format(data)} AS agrees\n  FROM {table} AS x\n"
        for kind, name, stored, data, table in parts
    )


def views(dialect: str) -> dict[str, str]:
    """Return each view's name with the statement that creates it, in an order in which they can be created."""
    words = _WORDS[dialect]
    selects = {
        "audit_incomplete": _INCOMPLETE,
        "audit_rollouts": _ROLLOUTS,
        "audit_calls": _CALLS,
        "audit_intents": _INTENTS,
        "audit_conflicts": _CONFLICTS,
        "audit_versions": _VERSIONS,
        "audit_lineage": _LINEAGE[dialect],
        "audit_ledger": _LEDGER,
        "audit_staging": _STAGING,
        "audit_exports": _EXPORTS,
    }
    texts = {name: select.format(**words) for name, select in selects.items()}
    texts["audit_integrity"] = integrity(words["sha256"])
    return {name: f"CREATE VIEW {name} AS\n{texts[name].strip()}" for name in _NAMES}
