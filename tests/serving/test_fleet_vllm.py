"""The whole of it with real engines: OpenAI servers of one export, asked, and stopped by Ctrl-C."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sandhi_core.pools.pool import DeploySettings
from sandhi_core.serving.completions import complete, fetch
from sandhi_core.serving.load import load
from tests.conftest import CHECKOUT
from tests.deployed import deployed
from tests.exported import make_case, make_models
from tests.serving.test_fleet import document, ports, running
from tests.serving.test_processes import gone_within

LIMITS = ("--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-model-len", "128")
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
PROMPT = (5, 6, 7)
OFF = 1e-4  # of a log-probability in float32; 1.4e-5 is the most that was seen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without residuals, in float32; `single` is served by transformers."""
    folder = tmp_path_factory.mktemp("export")
    case = make_case(folder, make_models(folder / "models", head_dim=32))  # vLLM's least on a CPU
    own = {"single": "transformers"}
    models = tuple(entry.model_copy(update={"engine": own.get(entry.name)}) for entry in case.pool.models)
    case.pool = case.pool.model_copy(update={"models": models, "deploy": DeploySettings(device_memory="2GiB")})
    return deployed(case)


@contextmanager
def served(root: Path, python: Path, only: tuple[str, ...], *options: str) -> Iterator[dict[str, Any]]:
    """The document of servers that have ended, by Ctrl-C and without a trace, when the block has."""
    command = [sys.executable, "-m", "sandhi_core", "serve", str(root), "--only", *only, "--json"]
    command += ["--python", str(python), "--port-base", str(ports(3)), "--ready-timeout", "500", *options]
    environment = os.environ | ENVIRONMENT
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = document(process)
            assert found["ok"], found["problems"]
            yield found
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.terminate()
    assert gone_within(running(found), 10)


def test_two_servers_of_vllm_answer_as_the_export_does(root: Path, vllm_python: Path) -> None:
    with served(root, vllm_python, ("sharded", "tied"), "--", *LIMITS) as found:
        assert [server["engine"] for server in found["servers"]] == ["vllm", "vllm"]
        for server in found["servers"]:
            answer = complete(server["url"].removesuffix("/v1"), server["name"], PROMPT, 8)
            with torch.inference_mode():
                logits = load(root / server["name"])(torch.tensor([answer.tokens])).logits[0, :-1]
            expected = torch.log_softmax(logits.float(), -1)
            logprobs = torch.tensor(answer.logprobs)
            chosen = expected.gather(1, torch.tensor(answer.tokens[1:])[:, None])[:, 0]
            assert (logprobs - chosen).abs().max() < OFF
            assert (expected.max(-1).values - chosen)[len(PROMPT) - 1 :].max() < 2 * OFF
            with urllib.request.urlopen(server["metrics"], timeout=60) as metrics:
                assert b"vllm:request_success_total" in metrics.read()
        assert 0 < found["memory"]["pss"] < found["memory"]["rss"]


def test_transformers_serve_answers_as_the_export_does_beside_vllm(root: Path, vllm_python: Path) -> None:
    """One deployment, two engines."""
    with served(root, vllm_python, ("single", "sharded"), "--", *LIMITS) as found:
        by_model = {server["name"]: server for server in found["servers"]}
        server, other = by_model["single"], by_model["sharded"]
        assert (
            other["engine"] == "vllm"
            and len(complete(other["url"].removesuffix("/v1"), "sharded", PROMPT, 8).chosen) == 8
        )
        assert server["engine"] == "transformers" and server["metrics"] is None
        asked = {"model": "single", "prompt": "abc", "max_tokens": 6, "temperature": 0}
        answer = fetch(f"{server['url']}/completions", "single", asked)
    tokenizer = AutoTokenizer.from_pretrained(root / "single", local_files_only=True)
    prompt = tokenizer("abc", return_tensors="pt")
    tokens = load(root / "single").generate(**prompt, max_new_tokens=6, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert answer["usage"]["completion_tokens"] == len(tokens) > 0
    assert answer["choices"][0]["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
