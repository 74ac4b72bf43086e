"""One request to a server that speaks OpenAI's `/v1/completions`: greedy tokens, and the log-probability of every
token of the prompt and of the answer.

Everything that a server could take from a model's `generation_config.json` is said outright, so that servers answer by
the weights alone.
"""

import http.client
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sandhi_core.errors import ServingError

PATH = "/v1/completions"
_TOKEN = "token_id:"
"""How vLLM writes a token as its number (`return_tokens_as_token_ids`)."""
_REMEDY = "see the server's log"
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers are here: no proxy between


@dataclass(frozen=True)
class Completion:
    """A prompt of P tokens with N that a server chose: `tokens` has all P + N, `logprobs` that of each but the first,
    given those before it (natural logarithm)."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompted: int

    @property
    def chosen(self) -> tuple[int, ...]:
        return self.tokens[self.prompted :]


def request(model: str, prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """The body of a request for `new_tokens` tokens after a prompt, given by its tokens; ends of text are no end."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "seed": 0,
        "logprobs": 0,
        "echo": True,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


def body(model: str, completion: Completion) -> dict[str, Any]:
    """A server's answer, as vLLM gives it to such a request; without texts, which nobody asked for."""
    named = [f"{_TOKEN}{token}" for token in completion.tokens]
    logprobs = {"tokens": named, "token_logprobs": [None, *completion.logprobs]}
    choice = {"index": 0, "text": "", "finish_reason": "length", "logprobs": logprobs}
    return {"object": "text_completion", "model": model, "choices": [choice]}


def fetch(url: str, model: str, asked: Mapping[str, Any] | None = None, timeout: float = 120.0) -> Any:
    """The JSON that the server of `model` answers to GET, or to POST of JSON. Raises ServingError where it does not."""
    data = None if asked is None else json.dumps(asked).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with _direct.open(urllib.request.Request(url, data, headers), timeout=timeout) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(2000).decode(errors="replace").split())
        raise _wrong(model, f"answers {error.code} to a request: {said[:300]}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _no_answer(model, error) from error


def complete(url: str, model: str, prompt: Sequence[int], new_tokens: int, timeout: float = 120.0) -> Completion:
    """Ask the server at `url` (without a path) within `timeout` seconds.

    Raises ServingError where it does not answer, or not to what was asked, or with a number that is not finite.
    """
    found = fetch(url + PATH, model, request(model, prompt, new_tokens), timeout)
    try:
        logprobs = found["choices"][0]["logprobs"]
        tokens = tuple(int(token.removeprefix(_TOKEN)) for token in logprobs["tokens"])
        numbers = tuple(float(number) for number in logprobs["token_logprobs"][1:])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_answer(model, error) from error
    if tokens[: len(prompt)] != tuple(prompt) or not len(tokens) == len(numbers) + 1 == len(prompt) + new_tokens:
        raise _wrong(model, f"was given {len(prompt)} tokens and asked for {new_tokens}, it answers {len(tokens)}")
    if not all(map(math.isfinite, numbers)):
        raise _wrong(model, "answers with log-probabilities that are not finite", "check the weights that it serves")
    return Completion(tokens, numbers, len(prompt))


def _no_answer(model: str, error: Exception) -> ServingError:
    return _wrong(model, f"gives no answer: {type(error).__name__}: {error}")


def _wrong(model: str, message: str, remedy: str = _REMEDY) -> ServingError:
    return ServingError(f"its server {message}", model=model, remedy=remedy)
