"""What a verification says: findings, each by a rule with a stable name, and how much was looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from tokencustody.txn.fence import RolloutKey


class Rule(StrEnum):
    """What must hold. The names are stable; the values of `RULES` say what each demands."""

    UNREADABLE = "unreadable"
    COLUMN_FORM = "column_form"
    FENCE_MISSING = "fence_missing"
    FENCE_VERSION = "fence_version"
    FENCE_STATE = "fence_state"
    FENCE_SNAPSHOT = "fence_snapshot"
    FENCE_INCOMPLETE = "fence_incomplete"
    FENCE_TIMES = "fence_times"
    HISTORY = "history"
    SEAL = "seal"
    RETIRED_RECORDS = "retired_records"
    FAILURE_HISTORY = "failure_history"
    REFUSAL_HISTORY = "refusal_history"
    CONFLICT_HASH = "conflict_hash"
    EXPORT_MARK = "export_mark"
    PAYLOAD_HASH = "payload_hash"
    PAYLOAD_FORM = "payload_form"
    WHOLE_HASH = "whole_hash"
    PROMPT_LOST = "prompt_lost"
    ENTRY_COLUMNS = "entry_columns"
    DIGEST = "digest"
    CUM_LEN = "cum_len"
    PARENT_MISSING = "parent_missing"
    PARENT_CIRCLE = "parent_circle"
    PARENT_SEQUENCE = "parent_sequence"
    LEDGER_HASH = "ledger_hash"
    LEDGER_ROW = "ledger_row"
    LEDGER_POSITION = "ledger_position"
    LEDGER_PARENT = "ledger_parent"
    LEDGER_CHAIN = "ledger_chain"
    LEDGER_STAGED = "ledger_staged"
    LEDGER_ENTRY = "ledger_entry"
    STAGED_HASH = "staged_hash"
    STAGED_CALL = "staged_call"
    STAGED_EXTRAS = "staged_extras"
    STAGED_CHAIN = "staged_chain"
    STAGED_LOST = "staged_lost"
    ATTACHMENT = "attachment"


RULES: Mapping[Rule, str] = {
    Rule.UNREADABLE: "the database can read the rollout's rows",
    Rule.COLUMN_FORM: "every value has the form of its column: type, known state, SHA-256, time, no negative number",
    Rule.FENCE_MISSING: "rows other than staged calls belong to a rollout that has a fence",
    Rule.FENCE_VERSION: "the fence is at the last version of its history",
    Rule.FENCE_STATE: "the fence is open, frozen or retired as its history says",
    Rule.FENCE_SNAPSHOT: "from the freeze on, fence and history name one snapshot, and none before",
    Rule.FENCE_INCOMPLETE: "the fence is incomplete if and only if a mark, a conflict or a dangling intent made it so",
    Rule.FENCE_TIMES: "the fence has the times of its state, those of its history",
    Rule.HISTORY: "versions run from 0 without a gap, but before an imported freeze; each event can happen there",
    Rule.SEAL: "a frozen rollout holds the calls, intents and ledger rows that it was sealed with",
    Rule.RETIRED_RECORDS: "a retired rollout holds no records",
    Rule.FAILURE_HISTORY: "each mark and conflict has its row in the history, and the other way round",
    Rule.REFUSAL_HISTORY: "each refusal has its row in the history, and the other way round",
    Rule.CONFLICT_HASH: "a conflict names the hash of the stored payload, and another one",
    Rule.EXPORT_MARK: "an export names the snapshot of the rollout and a version of it",
    Rule.PAYLOAD_HASH: "the stored bytes of a call have their SHA-256",
    Rule.PAYLOAD_FORM: "the stored bytes are a valid record of the call, in the form that the row says",
    Rule.WHOLE_HASH: "with the prefix that the parent holds, the payload has the SHA-256 of the whole",
    Rule.PROMPT_LOST: "the calls in which a prompt begins are there and sound",
    Rule.ENTRY_COLUMNS: "the audit columns of a call are those of its payload",
    Rule.DIGEST: "a call's digest is that of its whole sequence",
    Rule.CUM_LEN: "a call's cum_len is the length of its whole sequence",
    Rule.PARENT_MISSING: "a resolved parent is stored",
    Rule.PARENT_CIRCLE: "no call is its own ancestor",
    Rule.PARENT_SEQUENCE: "a prompt whose prefix was supplied begins with the whole sequence of its parent",
    Rule.LEDGER_HASH: "a ledger row has the SHA-256 of its columns",
    Rule.LEDGER_ROW: "a ledger row is a valid record, and its staging chain ends with its own key",
    Rule.LEDGER_POSITION: "ledger positions run from 1 without a gap, each once",
    Rule.LEDGER_PARENT: "the parent of a ledger row is recorded, and ends where the row begins",
    Rule.LEDGER_CHAIN: "the staging chain of a ledger row continues that of its parent",
    Rule.LEDGER_STAGED: "a ledger row agrees with the call that is staged under its key",
    Rule.LEDGER_ENTRY: "a ledger row agrees with the complete record of the same call",
    Rule.STAGED_HASH: "the stored bytes of a staged call have their SHA-256",
    Rule.STAGED_CALL: "a staged call decodes and has its digest",
    Rule.STAGED_EXTRAS: "the extras of a staged call have their digest",
    Rule.STAGED_CHAIN: "a staged call continues its parent: length, chain hash, cumulative hash",
    Rule.STAGED_LOST: "the staged calls in which a staged call begins are sound",
    Rule.ATTACHMENT: "an attachment has its SHA-256, decodes, and belongs to a staged call",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One violated rule. `model_call_id` is empty where no single call is meant; `text` holds no token data."""

    rule: Rule
    run: str
    rollout_id: str
    model_call_id: str
    text: str


@dataclass(slots=True)
class Counts:
    """How much was looked at.

    `calls` counts complete records, `bytes` what was hashed of payloads, extras and attachments as they are stored.
    `retokenized` counts calls whose prompt does not begin with the sequence of their resolved parent, whose prefix the
    engine was not given: no fault, but they continue no chain of tokens. `parents_not_recorded` counts calls that say
    nothing of their parent, for their writer stamped no lineage.
    """

    rollouts: int = 0
    calls: int = 0
    ledger_rows: int = 0
    staged_calls: int = 0
    attachments: int = 0
    bytes: int = 0
    retokenized: int = 0
    parents_not_recorded: int = 0

    def add(self, other: Counts) -> None:
        """Add what another part of the work has looked at."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Found:
    """What is found in rollouts, one after the other."""

    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)

    def add(self, key: RolloutKey, rule: Rule, text: str, model_call_id: str = "") -> None:
        """Add a finding on a rollout, or on one call of it."""
        self.findings.append(Finding(rule, key.run, key.rollout_id, model_call_id, text))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. `database` is its URL without a password."""

    database: str
    counts: Counts
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def by_rule(self) -> dict[str, int]:
        """Return how many findings each violated rule has, in the order of the rules."""
        counted = Counter(finding.rule for finding in self.findings)
        return {rule.value: counted[rule] for rule in Rule if counted[rule]}

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "database": self.database,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            **asdict(self.counts),
            "findings_by_rule": self.by_rule(),
            "findings": [asdict(finding) for finding in self.findings],
        }
