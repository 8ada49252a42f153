"""Single requests to the system on one open file, with what the standard library leaves out.

Owns complete writes, reads, switching direct I/O and reserving space. When to ask for which is up to `sinks`,
`writer` and `reader`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable

# The strictest common demand on offset, length and address of direct I/O; also the page size mmap aligns to.
ALIGNMENT = 4096
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Linux writes at most 2 GiB - 4 KiB at once; smaller pieces let an interrupted program end sooner.
_PIECE_BYTES = 64 << 20


def write_fully(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset` bytes, however little the system takes at a time.

    Where the file system turns out to refuse direct I/O of this kind, or what is left after a short write is
    not aligned, go on through the page cache.
    """
    is_refused = False
    while data:
        try:
            count = os.pwrite(descriptor, data[:_PIECE_BYTES], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or is_refused:
                raise
            disable_direct(descriptor)
            is_refused = True
            continue
        data = data[count:]
        offset += count


def read_some(descriptor: int, data: memoryview, offset: int) -> int:
    """Read what the system gives at once; 0 at the end of the file.

    Where the file system turns out to refuse direct I/O of this kind, go on through the page cache.
    """
    try:
        return os.preadv(descriptor, [data], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        disable_direct(descriptor)
    return os.preadv(descriptor, [data], offset)


def enable_direct(descriptor: int) -> bool:
    """Turn O_DIRECT on; False where the system or file system has none."""
    if not _O_DIRECT:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
    except OSError:  # EINVAL: not here
        return False
    return True


def disable_direct(descriptor: int) -> None:
    """Turn O_DIRECT off.

    It may be off already: several threads use a descriptor, and another may have been refused as well.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)


def reserve(descriptor: int, nbytes: int) -> None:
    """Reserve disk space for `nbytes` bytes, so that a full disk is noticed before the work, not after it.

    Does nothing where the file system cannot reserve.

    Raises:
        OSError: ENOSPC, EDQUOT or EFBIG.
    """
    state = os.fstatvfs(descriptor)
    # First ask: reserving more than there is may take what is left from others for a moment, only to give up.
    if state.f_blocks and nbytes > state.f_bfree * state.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if not nbytes or _fallocate is None:
        return
    while _fallocate(descriptor, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(code, os.strerror(code))
        if code != errno.EINTR:
            return


def _load_fallocate() -> Callable[[int, int, int, int], int] | None:
    # Not os.posix_fallocate: where the file system cannot reserve, the C library imitates it by writing to
    # every block of the file, which doubles the I/O.
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate64
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function


_fallocate = _load_fallocate()
