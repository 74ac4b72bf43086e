"""Real vLLM engines, in vLLM's own environment: that of the fixture `vllm_python`."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CHECKOUT
from tests.processes import kept

FLAGS = {"quantization": "sandhi", "load_format": "sandhi"}
_CACHE = CHECKOUT / ".sandhi-demo" / "vllm"  # what vLLM and torch's compiler keep from one run to the next
_TIMEOUT = 500.0  # seconds an engine gets to start and to answer: some 15, but where every core is busy


class Engines:
    """Starts engines, each in a process of its own below one that has imported vLLM."""

    def __init__(self, folder: Path, python: Path) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._count = 0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("engines.py")],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ
                | {
                    "PYTHONPATH": str(CHECKOUT),
                    "VLLM_CACHE_ROOT": str(_CACHE),
                    "VLLM_CONFIG_ROOT": str(_CACHE),
                    "TORCHINDUCTOR_CACHE_DIR": str(_CACHE / "inductor"),
                },
                start_new_session=True,
            )
        kept.add(self._process.pid)

    def start(
        self,
        model: Path,
        prompts: Sequence[Sequence[int]] = ((1, 2),),
        tokens: int = 1,
        hold: bool = False,
        **engine: Any,
    ) -> Path:
        """Ask for an engine; the file in which its answers will be."""
        self._count += 1
        result = self._folder / f"{self._count}.json"
        job = {
            "result": str(result),
            "engine": {"model": str(model), **FLAGS, **engine},
            "prompts": prompts,
            "tokens": tokens,
            "hold": hold,
        }
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        return result

    def wait(self, result: Path) -> dict[str, Any]:
        end = time.monotonic() + _TIMEOUT
        while not result.exists():
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text()[-5000:]
            time.sleep(0.1)
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def answered(self, result: Path) -> dict[str, Any]:
        """The answers of an engine. Fails with its log where it has none."""
        found = self.wait(result)
        assert "error" not in found, f"{found['error']}\n{self._log.read_text()[-5000:]}"
        return found

    def failed(self, result: Path) -> str:
        """What stopped an engine from starting."""
        found = self.wait(result)
        assert "error" in found, "the engine has started"
        return str(found["error"])

    def close(self) -> None:
        """End whatever is left; nothing outlives the tests."""
        assert self._process.stdin
        self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            kept.discard(self._process.pid)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, vllm_python: Path) -> Iterator[Engines]:
    started = Engines(tmp_path_factory.mktemp("engines"), vllm_python)
    try:
        yield started
    finally:
        started.close()
