"""Golden vectors of the staging digests: inputs with the results that every implementation must give."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from tokencustody.staging.digest import (
    compute_chain_hash,
    compute_extras_digest,
    compute_staging_digest,
    encode_token_ids,
    hash_token_ids,
)


def load_golden_vectors() -> dict[str, Any]:
    """Return the vectors by kind: `token_ids`, `chain_hashes`, `extras` and `staged_calls`."""
    vectors: dict[str, Any] = json.loads(
        resources.files("tokencustody.staging").joinpath("golden_vectors.json").read_text(encoding="utf-8")
    )
    return vectors


def assert_golden_vectors() -> None:
    """Raise AssertionError, naming the vector, unless this installation computes every golden vector."""
    vectors = load_golden_vectors()
    for number, vector in enumerate(vectors["token_ids"]):
        _expect(encode_token_ids(vector["token_ids"]).hex(), vector["encoding"], f"token encoding {number}")
        _expect(hash_token_ids(vector["token_ids"]), vector["hash"], f"token hash {number}")
    for number, vector in enumerate(vectors["chain_hashes"]):
        chain_hash = compute_chain_hash(vector["parent_chain_hash"], vector["token_ids_delta"])
        _expect(chain_hash, vector["chain_hash"], f"chain hash {number}")
    for number, vector in enumerate(vectors["extras"]):
        _expect(compute_extras_digest(vector["extras"]), vector["digest"], f"extras digest {number}")
    for number, vector in enumerate(vectors["staged_calls"]):
        _expect(compute_staging_digest(**vector["fields"]), vector["digest"], f"staged call digest {number}")


def _expect(computed: str, golden: str, name: str) -> None:
    # No assert statement: Python's -O drops those.
    if computed != golden:
        raise AssertionError(f"{name} is {computed}, the golden vector says {golden}")
