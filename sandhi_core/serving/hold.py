"""Serves models, so that their memory can be read from outside while they answer.

    python -m sandhi_core.serving.hold PORT MODEL DIRECTORY [MODEL DIRECTORY ...]

One process a model, forked from one that has imported transformers, so that a further model costs no further
import. Each loads its directory as serving.load does, in the dtype of the files, reads every parameter and residual,
and answers `/v1/completions` (serving.completions) on a port of its own. Once all have said how it went, their parent
answers GET on PORT with a list, of each `{"model", "pid", "port", "unmapped"}` or `{"model", "error"}`. It waits for
children that end, so that whoever looks sees that they are gone.

`transformers serve` would be no help here: it leaves residuals out, and gives no log-probabilities.
"""

import json
import os
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from sandhi_core.errors import SandhiError
from sandhi_core.serving.census import unmapped_bytes
from sandhi_core.serving.completions import PATH, Completion, body
from sandhi_core.serving.load import load

HOST = "127.0.0.1"


def main(arguments: list[str]) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    port, *words = arguments
    pairs = list(zip(words[::2], words[1::2], strict=True))
    for _, directory in pairs:
        with suppress(Exception):  # the child says what is wrong with a directory
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # imports its module, once for all
    said, saying = os.pipe()
    for model, directory in pairs:
        if os.fork() == 0:
            os.close(said)
            _serve(model, Path(directory), saying)
    os.close(saying)
    with os.fdopen(said) as lines:
        told = [line for _, line in zip(pairs, lines, strict=False)]  # one each, or fewer where some have died
    _Parent((HOST, int(port)), _answering(lambda: f"[{','.join(told)}]")).serve_forever()
    return 0


class _Parent(HTTPServer):
    def service_actions(self) -> None:
        with suppress(ChildProcessError):  # all are gone
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _serve(model: str, directory: Path, saying: int) -> None:
    """Load and answer until the process is ended. Does not return."""
    try:
        network = load(directory, name=model)
        server = HTTPServer((HOST, 0), _answering(lambda: "", lambda asked: _completed(network, model, asked)))
        unmapped = unmapped_bytes(network, directory)
        _say(saying, {"model": model, "pid": os.getpid(), "port": server.server_port, "unmapped": unmapped})
        server.serve_forever()
    except SandhiError as error:
        _say(saying, {"model": model, "error": error.problem.message})
    except Exception as error:
        _say(saying, {"model": model, "error": f"{type(error).__name__}: {error}"[:500]})
    finally:
        os._exit(1)  # nothing of the parent's is to be cleaned up twice


def _say(saying: int, message: dict[str, object]) -> None:
    os.write(saying, json.dumps(message).encode() + b"\n")  # one write: lines do not mix
    os.close(saying)  # the last one to do so ends the parent's waiting, be it by dying


def _answering(get: Any, post: Any = None) -> type[BaseHTTPRequestHandler]:
    """Answers GET with the text of `get()`, POST with the JSON of `post(JSON asked)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, get().encode())

        def do_POST(self) -> None:
            if post is None or self.path != PATH:
                return self._answer(404, b"")
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(200, json.dumps(post(asked)).encode())
            except Exception as error:
                self._answer(400, f"{type(error).__name__}: {error}".encode())

        def _answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Requests are no news."""

    return Handler


@torch.inference_mode()
def _completed(network: Any, model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request of serving.completions."""
    prompt = [int(token) for token in asked["prompt"]]
    found = network(torch.tensor([prompt]), use_cache=True)
    likelihoods = _logs(found.logits[0])
    logprobs = likelihoods[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    last, tokens = likelihoods[-1], list(prompt)
    for _ in range(int(asked["max_tokens"])):
        token = int(last.argmax())
        tokens.append(token)
        logprobs.append(float(last[token]))
        found = network(torch.tensor([[token]]), past_key_values=found.past_key_values, use_cache=True)
        last = _logs(found.logits[0])[-1]
    return body(model, Completion(tuple(tokens), tuple(logprobs), len(prompt)))


def _logs(logits: Tensor) -> Tensor:
    """[T, vocabulary], in fp32."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
