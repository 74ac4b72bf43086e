"""Arithmetic whose bytes must not depend on how many threads do it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Several split sums of products, each number of them otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def steady(device: torch.device) -> AbstractContextManager[None]:
    """For one pass of a model on `device` from which numbers are kept: on a CPU one thread answers."""
    return one_thread() if device.type == "cpu" else nullcontext()
