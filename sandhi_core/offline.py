"""Nothing is ever fetched: models, tokenizers and data come from the disk or the local cache."""

import os


def work_offline() -> None:
    """To be called before anything of Hugging Face is imported: their libraries look at the environment then."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress is reported by stages, not by bars of libraries
