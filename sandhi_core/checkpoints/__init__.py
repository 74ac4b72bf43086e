"""Checkpoints as they are on disk: files, tensors, and what a configuration makes of them."""
