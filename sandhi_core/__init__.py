"""Sandhi: serve many fine-tuned language models from shared weights. See README.md and docs/."""
