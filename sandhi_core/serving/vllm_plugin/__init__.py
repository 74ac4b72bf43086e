"""The plugin by which vLLM serves exports: their shared tensors mapped, not copied.

    vllm serve EXPORT/MODEL --quantization sandhi --load-format sandhi

vLLM is imported by `register` alone: whoever imports this package otherwise needs none.
"""


def register() -> None:
    """Make the quantization and the load format `sandhi` known; vLLM calls this in each of its processes, perhaps more
    than once. Raises ImportError where vLLM is no version that the plugin knows its way in."""
    from sandhi_core.serving.vllm_plugin import loader  # noqa: F401
