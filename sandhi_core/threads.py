"""Work on several threads, and arithmetic whose bytes must not depend on how many of them do it."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

MOST_THREADS = 8
"""Beyond, threads that are fed by one interpreter gain little."""

T = TypeVar("T")
R = TypeVar("R")


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


def each_on_a_thread(work: Callable[[T], R], items: Iterable[T], *, writes: bool = False) -> Iterator[R]:
    """The results in the order of `items`, whose work is done by as many threads as torch may use (OMP_NUM_THREADS),
    each of which calculates alone. Work that `writes` waits for the disk half of the time: twice as many do it. One at
    a time in a process: torch knows one number for threads to come.

    Raises what the first of them raised; of the others those that have not begun are left out.
    """
    threads = torch.get_num_threads()
    most = min(MOST_THREADS, 2 * threads if writes else threads)
    pool = ThreadPoolExecutor(most, initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads to come begin with what was set last
