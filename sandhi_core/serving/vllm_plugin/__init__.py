"""The plugin by which vLLM serves exports: their shared tensors mapped, not copied."""


def register() -> None:
    """Make the quantization and the load format `sandhi` known; vLLM calls this in each of its processes."""
