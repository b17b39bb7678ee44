"""The items of a request body are those that nemo-gym makes of it, and hash alike.

`request_bodies.json` holds bodies, and the items and hashes that release 0.7.0 makes of them. The function that makes
them is in its server, whose dependencies (anthropic, omegaconf, …) are not installed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nemo_gym.token_id_capture import fingerprint as peer_fingerprint
from pydantic import BaseModel

from tokencustody import request_items
from tokencustody.errors import InvalidRecordError
from tokencustody.fingerprint import assistant_fingerprint, conversation_digest
from tokencustody.lineage import RolloutLineage, stamp_continuation
from tokencustody.records import TokenEntry, stamp_lineage

BODIES = json.loads((Path(__file__).parent / "request_bodies.json").read_text())
USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "edit"}}, {"type": "function", "function": {"name": "ls"}}]


# Gym hashes what is in the body, by which another request cannot be told from it: here they have no items.
NOTHING_SAID = ("resp prev", "resp conversation", "resp prompt", "completions chat tools")


@pytest.mark.parametrize("vector", BODIES, ids=lambda vector: vector["name"])
def test_a_body_has_the_items_and_hashes_that_gym_makes_of_it(vector: dict[str, Any]) -> None:
    before = json.dumps(vector["body"])
    items = request_items(vector["body"])
    if vector["name"] in NOTHING_SAID:
        assert items == []
        return
    assert items == vector["items"]
    for fingerprint in (assistant_fingerprint, peer_fingerprint.assistant_fingerprint):
        assert fingerprint(items) == vector["assistant_fingerprint"]
    for digest in (conversation_digest, peer_fingerprint.conversation_digest):
        assert digest(items) == vector["conversation_digest"]
    assert json.dumps(vector["body"]) == before


class Body(BaseModel):
    """A body that a server has parsed."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def test_a_parsed_body_has_the_same_items() -> None:
    body: dict[str, Any] = {"messages": [USER], "tools": TOOLS}
    assert request_items(Body(**body)) == request_items(body)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tools": TOOLS}, {"tools": TOOLS[1:]}),
        ({"tools": TOOLS}, {}),
        ({}, {"tools": TOOLS}),
        ({"instructions": "Be brief."}, {"instructions": "Be long."}),
        ({"instructions": "Be brief."}, {}),
        ({"system": "Be brief."}, {"system": "Be long."}),
        ({"system": [{"type": "text", "text": "Be brief."}]}, {}),
    ],
    ids=repr,
)
def test_a_call_with_another_envelope_is_no_parent(first: dict[str, Any], second: dict[str, Any]) -> None:
    entry = TokenEntry(
        rollout_id="r",
        model_call_id="c",
        prompt_token_ids=[1],
        generation_token_ids=[2],
        generation_log_probs=[-0.5],
        output_items=[ANSWER],
    )
    lineage = RolloutLineage()
    lineage.add_entry(
        stamp_continuation(stamp_lineage(entry, None), request_items({"messages": [USER], **first}))
    )
    following = [USER, ANSWER, USER]
    assert lineage.resolve(request_items({"messages": following, **first})).status == "resolved"
    assert lineage.resolve(request_items({"messages": following, **second})).reason == "no_match"


def test_a_system_prompt_of_blocks_is_the_text_that_gym_makes_of_them() -> None:
    blocks = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]
    as_blocks = request_items({"messages": [USER], "system": blocks})
    assert as_blocks == request_items({"messages": [USER], "system": "a\nb"})
    assert len(as_blocks) == 2


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"messages": ["text"]}, r"items\[0\] must be an object"),
        ({"messages": [USER], "tools": [{1, 2}]}, "instructions or tools"),
    ],
    ids=["items", "tools"],
)
def test_a_body_that_makes_no_items_is_refused(body: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRecordError, match=what):
        request_items(body)
