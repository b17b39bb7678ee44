"""The views of revision 0005: those of 0004, with what differs in some of them.

New columns stand last, so that PostgreSQL can replace a view that others build on.
"""

from __future__ import annotations

from tokencustody.schema.migrations import views_0004

# What of a view's text becomes what. Each text stands once in it, or each time with the same meaning.
_CHANGES = {
    "audit_incomplete": {
        "x.refusal_code IS NULL": "x.refused_at IS NULL",
        "OR coalesce(x.chain_hash, '') = ''": "OR coalesce(x.chain_hash, '') = '' OR x.cumulative_hash = ''",
    },
    "audit_rollouts": {"x.refusal_code IS NULL": "x.refused_at IS NULL"},
    "audit_intents": {"i.refusal_code IS NOT NULL": "i.refused_at IS NOT NULL"},
    "audit_versions": {"AS failure_kind": "AS failure_kind, v.seal_version"},
    "audit_staging": {
        "= 0 AS is_orphan": """= 0
         AND (f.state <> 'frozen' OR f.state IS NULL
              OR (SELECT count(*) FROM snapshot_versions AS v
                   WHERE v.run = s.run AND v.rollout_id = s.rollout_id
                     AND v.model_call_id = s.model_call_id AND v.event = 'late_stage') = 0) AS is_orphan,
       s.attachments_sha256"""
    },
    "audit_exports": {"false) AS is_current": "false) AS is_current, x.is_held"},
    "audit_ledger": {
        "c.payload_sha256, c.row_sha256": (
            "c.payload_sha256, c.row_sha256,\n       c.recorded_fingerprint, c.recorded_fingerprint_version"
        ),
        "NULL, c.row_sha256": "NULL, c.row_sha256, NULL, NULL",
    },
}


def changed() -> list[str]:
    """Return the names of the views whose text is another one than in revision 0004."""
    return list(_CHANGES)


def views(dialect: str) -> dict[str, str]:
    """Return each view's name with the statement that creates it, in an order in which they can be created."""
    texts = views_0004.views(dialect)
    for name, changes in _CHANGES.items():
        for before, after in changes.items():
            texts[name] = texts[name].replace(before, after)
    return texts
