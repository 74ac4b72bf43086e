"""Holds models, so that their memory can be read from outside.

    python -m sandhi_core.serving.hold MODEL DIRECTORY [MODEL DIRECTORY ...]

One process a model, forked from one that has imported transformers, so that a further model costs no further
import. Each loads its directory as serving.load does, in the dtype of the files, reads every parameter and residual,
and writes one line of JSON to standard output: `{"model", "pid", "unmapped"}`, or `{"model", "error"}`. Then it stays
until standard input ends, hence no longer than whoever started it lives.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from sandhi_core.errors import SandhiError
from sandhi_core.memory import mappings, weight_files
from sandhi_core.rungs.residual import factors
from sandhi_core.serving.load import load


def main(arguments: list[str]) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    for _, directory in pairs:
        with suppress(Exception):  # the child says what is wrong with a directory
            MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(directory))]  # imports its module, once for all
    children = [_fork(model, Path(directory)) for model, directory in pairs]
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


def _fork(model: str, directory: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        network = load(directory, name=model)
        _say({"model": model, "pid": os.getpid(), "unmapped": unmapped_bytes(network, directory)})
        os.read(sys.stdin.fileno(), 1)  # until the other end closes
        status = 0
    except SandhiError as error:
        _say({"model": model, "error": error.problem.message})
    except Exception as error:
        _say({"model": model, "error": f"{type(error).__name__}: {error}"[:500]})
    finally:
        os._exit(status)  # nothing of the parent's is to be cleaned up twice


def unmapped_bytes(network: torch.nn.Module, directory: Path) -> int:
    """Read every parameter and every factor of a residual once; bytes of those that do not lie in a mapping of the
    directory's weight files.

    A tied parameter counts once.
    """
    parameters = {p.data_ptr(): p.detach() for p in (*network.parameters(), *factors(network))}
    for parameter in parameters.values():
        parameter.sum()
    files = weight_files(directory)
    spans = [(m.start, m.end) for m in mappings(os.getpid()) if files.get(m) is not None]
    return sum(
        parameter.nbytes
        for address, parameter in parameters.items()
        if not any(start <= address and address + parameter.nbytes <= end for start, end in spans)
    )


def _say(message: dict[str, object]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")  # one write: lines do not mix


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
