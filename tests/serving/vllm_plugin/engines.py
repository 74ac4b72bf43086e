"""Runs vLLM engines for the tests, in vLLM's own environment: `python engines.py`, a job a line on standard input.

A job is JSON: `result` (the file to write), `engine` (arguments of vllm.LLM), `prompts` (lists of tokens), `tokens`
(how many to add), `hold` (stay until standard input ends). vLLM is imported once; each job runs in a process of its
own, forked from that one. The result is JSON: `tokens` and `logprobs` of each prompt and `pids`, the process and those
below it; or `error`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
import vllm.model_executor.models.llama  # what every engine would import again
import vllm.v1.worker.cpu_worker
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401

DEFAULTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "seed": 0,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def run(job: dict[str, Any], end: int) -> None:
    """`end`: a pipe that closes with the process above."""
    result = Path(job["result"])
    try:
        found = answered(job)
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    aside = result.with_suffix(".part")
    aside.write_text(json.dumps(found))
    aside.rename(result)
    if job["hold"]:
        os.read(end, 1)


def answered(job: dict[str, Any]) -> dict[str, Any]:
    engine = vllm.LLM(**DEFAULTS | job["engine"])
    settings = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    answers = [answer.outputs[0] for answer in engine.generate(prompts, settings, use_tqdm=False)]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ],
        "pids": [os.getpid(), *below(os.getpid())],
    }


def below(pid: int) -> list[int]:
    words = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    found = [int(word) for word in " ".join(words).split()]
    return [*found, *(pid for child in found for pid in below(child))]


def main() -> None:
    pids = []
    end, above = os.pipe()
    while line := sys.stdin.buffer.raw.readline():  # unbuffered: nothing read ahead that a fork would have twice
        pid = os.fork()
        if pid == 0:
            os.close(above)
            run(json.loads(line), end)
            os._exit(0)
        pids.append(pid)
    os.close(above)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
