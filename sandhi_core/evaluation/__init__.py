"""Scoring: tasks and requests through lm-eval, one resident model, every score kept by what it was made from."""

import os

# Models and data come from the disk or the local cache, never from a hub; read by huggingface_hub, transformers
# and datasets when they are first imported, which is why it stands here.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval draws bars of its own; progress is reported by stages
