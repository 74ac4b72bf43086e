"""A quick look at an exported model.

    python -m sandhi_core.serving.look DIRECTORY

reads prompts from standard input, one a line, and prints the greedy continuation of each, on one line too (its line
feeds as \\n).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging

from sandhi_core.errors import SandhiError
from sandhi_core.serving.load import load

NEW_TOKENS = 64
"""How far a prompt is continued at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    description = "Continue prompts from standard input, one a line, with an exported model."
    parser = argparse.ArgumentParser(prog="python -m sandhi_core.serving.look", description=description)
    parser.add_argument("directory", type=Path, help="of one model of an export")
    directory: Path = parser.parse_args(arguments).directory
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = load(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except SandhiError as error:
        print(error, file=sys.stderr)
        return 1
    for line in sys.stdin:
        if prompt := line.rstrip("\n"):
            print(_continued(model, tokenizer, prompt).replace("\n", "\\n"), flush=True)
    return 0


def _continued(model: Any, tokenizer: Any, prompt: str) -> str:
    asked = tokenizer(prompt, return_tensors="pt")
    answer = model.generate(
        input_ids=asked["input_ids"],
        attention_mask=asked["attention_mask"],
        do_sample=False,
        num_beams=1,
        max_new_tokens=NEW_TOKENS,
    )
    text: str = tokenizer.decode(answer[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


if __name__ == "__main__":
    sys.exit(main())
