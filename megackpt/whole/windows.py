"""Windows: stretches of bytes that are read while the previous one is written, in two buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]  # [n]


class SizedWindow(Protocol):
    """What is read together."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...


W = TypeVar("W", bound=SizedWindow)


def window_threads() -> ThreadPoolExecutor:
    """Return the threads that fill windows: two, as a format may write two files at a time.

    They belong to a `with` block of a function, never of a generator. An error that keeps a generator from
    its end leaves it to the garbage collector. That runs in any thread, which may hold a lock of `threading`,
    and there nothing may wait for another thread.
    """
    return ThreadPoolExecutor(2, thread_name_prefix="megackpt-window")


def filled_windows(
    windows: Sequence[W], fill: Callable[[W, ByteArray], None], threads: Executor
) -> Iterator[tuple[W, ByteArray]]:
    """Yield each window with its bytes, which are valid until the next one; that one is read meanwhile.

    Args:
        windows: the windows, in order.
        fill: fills a buffer, which may be longer than the window. It is called by another thread.
        threads: of `window_threads`. A window may still be filled when this iterator has been closed.
    """
    longest = max((window.nbytes for window in windows), default=0)
    buffers = [np.empty(longest, np.uint8) for _ in windows[:2]]
    pending = [threads.submit(fill, windows[0], buffers[0])] if windows else []
    for number, window in enumerate(windows):
        pending.pop().result()
        if number + 1 < len(windows):
            following = number + 1
            pending.append(threads.submit(fill, windows[following], buffers[following % 2]))
        yield window, buffers[number % 2]
