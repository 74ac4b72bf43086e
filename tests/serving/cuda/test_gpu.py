"""The real thing: an owner and two engines on a GPU, memory as the driver counts it (cudaMemGetInfo)."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sandhi_core.serving.mapped import MappedModel
from tests.exported import UP, make_case, make_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch.cuda.is_available() is false: there is no GPU here"
    ),
]

ENGINE = """
import json, sys, torch
from pathlib import Path
from sandhi_core.serving.cuda.client import attach
from sandhi_core.serving.mapped import MappedModel

root, path, name, tensor = sys.argv[1:]
mapped = MappedModel.open(Path(root) / name)
digests = {n: mapped.tensors[n].digest for n in mapped.shared()}
x = torch.ones(1, mapped.tensors[tensor].shape[1], dtype=torch.bfloat16, device="cuda:0")
torch.nn.functional.linear(x, torch.ones(8, x.shape[1], dtype=x.dtype, device=x.device))  # what libraries take
torch.cuda.synchronize()
before = torch.cuda.mem_get_info(0)[0]
held = attach(Path(path), mapped.manifest.digest, name, digests, device=0, check="full")
equal = all(torch.equal(held.tensor(n).cpu(), mapped.tensor(n)) for n in digests)
answer = torch.nn.functional.linear(x, held.tensor(tensor)).float().sum().item()
torch.cuda.synchronize()
print(json.dumps({"taken": before - torch.cuda.mem_get_info(0)[0], "equal": equal, "answer": answer}), flush=True)
for line in sys.stdin:
    if line == "write\\n":
        try:
            held.tensor(tensor).fill_(0)
            torch.cuda.synchronize()
            print(json.dumps({"refused": False}), flush=True)
        except RuntimeError as error:
            print(json.dumps({"refused": True, "error": str(error).splitlines()[0]}), flush=True)
    else:
        held.check("full")
        print(json.dumps({"alive": held.alive}), flush=True)
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def said(process: subprocess.Popen[str], line: str = "") -> Any:
    given, output = process.stdin, process.stdout
    assert given is not None and output is not None
    if line:
        given.write(f"{line}\n")
        given.flush()
    return json.loads(output.readline())


def test_two_engines_hold_what_one_owner_has(tmp_path: Path) -> None:
    size = {"hidden_size": 1024, "intermediate_size": 16384}
    root, _ = make_case(tmp_path / "case", make_models(tmp_path / "models", torch.bfloat16, **size)).exported()
    path = str(tmp_path / "s")
    up = MappedModel.open(root / "single").tensor(UP)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(0)[0]
    with started("-m", "sandhi_core.serving.cuda.owner", str(root), "--device", "0", "--socket", path) as owner:
        ready = said(owner)
        with_owner = torch.cuda.mem_get_info(0)[0]
        assert before - with_owner >= ready["reserved"] >= ready["bytes"] >= up.nbytes
        arguments = ("-c", ENGINE, str(root), path)
        with started(*arguments, "single", UP) as one, started(*arguments, "sharded", UP) as other:
            for first in (said(one), said(other)):
                print(f"owner {before - with_owner}, reserved {ready['reserved']}, engine {first}")
                assert first["equal"] and first["taken"] < ready["reserved"] // 4
                assert first["answer"] == pytest.approx(up.double().sum().item(), rel=0.05, abs=50)
            assert said(other, "write")["refused"]
            assert said(one, "check") == {"alive": True}
            owner.send_signal(signal.SIGKILL)
            owner.wait(60)
            assert said(one, "check") == {"alive": False}  # what is mapped stays
