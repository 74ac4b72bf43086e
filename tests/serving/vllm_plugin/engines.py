"""Runs vLLM engines for the tests, in vLLM's own environment: `python engines.py`, a job a line on standard input.

A job is JSON: `result` (the file to write), `engine` (arguments of vllm.LLM), `prompts` (lists of tokens), `tokens`
(how many to add), `hold` (stay until standard input ends). vLLM is imported once; each job runs in a process of its own,
forked from that one, with a session of its own. The result is JSON: `tokens` and `logprobs` of each prompt, and `maps`,
what the process and its workers have mapped of weight files; or `error`.
"""

import json
import os
import signal
import sys
from pathlib import Path

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

DEFAULTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 16 << 20,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "seed": 0,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def run(job: dict) -> None:
    result = Path(job["result"])
    done = result.with_suffix(".part")
    try:
        engine = vllm.LLM(**DEFAULTS | job["engine"])
        settings = vllm.SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        answers = [answer.outputs[0] for answer in engine.generate(prompts, settings, use_tqdm=False)]
        found = {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
                for answer in answers
            ],
            "pids": [os.getpid(), *children(os.getpid())],
        }
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    done.write_text(json.dumps(found))
    done.rename(result)
    if job.get("hold"):
        sys.stdin.read()


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()]
    return [*found, *(below for child in found for below in children(child))]


def main() -> None:
    pids = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
