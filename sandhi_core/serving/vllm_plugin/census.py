"""vLLM's worker on a CPU (vLLM 0.32, vllm/v1/worker/cpu_worker.py), telling what it holds.

It writes that down by itself, once it is ready: to ask it from outside, its server would have to be in development
mode, in which whoever reaches the port can call any function of it.
"""

import os
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from sandhi_core.serving.census import FOLDER, tell, unmapped_bytes


class CensusWorker(CPUWorker):  # type: ignore[misc]
    """Tells into the folder that the environment names."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # the last that vLLM does to weights
        tell(Path(os.environ[FOLDER]), unmapped_bytes(self.model_runner.model, Path(self.model_config.model)))
        return times
