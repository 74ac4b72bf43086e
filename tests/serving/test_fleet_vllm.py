"""The whole of it with the real vLLM: two OpenAI servers of one export, asked, and stopped by Ctrl-C."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from sandhi_core.pool import DeploySettings
from tests.deployed import deployed
from tests.exported import make_case, make_models
from tests.serving.test_fleet import CHECKOUT, document, ports, running
from tests.serving.test_processes import gone_within

PYTHON = CHECKOUT / ".venv-vllm" / "bin" / "python"
LIMITS = ("--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-model-len", "128")
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PLUGIN = importlib.util.find_spec("sandhi_core.serving.vllm_plugin.loader") is not None


def asked(url: str, model: str) -> Any:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM in .venv-vllm")
@pytest.mark.timeout(1200)
def test_two_servers_answer_and_nothing_is_left(tmp_path: Path) -> None:
    case = make_case(tmp_path, make_models(tmp_path / "models", torch.bfloat16, head_dim=32))  # vLLM's least on a CPU
    deploy = DeploySettings(plugin=PLUGIN, device_memory="2GiB")
    case.pool = case.pool.model_copy(update={"deploy": deploy})
    root = deployed(case)
    command = [sys.executable, "-m", "sandhi_core", "serve", str(root), "--only", "single", "tied", "--json"]
    command += ["--python", str(PYTHON), "--port-base", str(ports(3)), "--ready-timeout", "500", "--", *LIMITS]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen(command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = document(process)
            assert found["ok"], found["problems"]
            for server in found["servers"]:
                answer = asked(server["url"], server["name"])
                assert answer["usage"]["completion_tokens"] >= 1
                with urllib.request.urlopen(server["metrics"], timeout=60) as metrics:
                    assert b"vllm:request_success_total" in metrics.read()
            pids = running(found)
            if PLUGIN:
                assert 0 < found["memory"]["pss"] < found["memory"]["rss"]
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
        finally:
            process.terminate()
    assert gone_within(pids, 10)
