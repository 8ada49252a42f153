"""Every tunable of saving and loading, with its default.

Owns the two option objects; nothing else in the library holds a tunable.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.errors import DeclarationError


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save.

    Attributes:
        timeout_s: how long a rank waits for the others at each meeting point, in seconds.
        piece_bytes: how much of a tensor that is not contiguous in host memory is copied at a time.
    """

    timeout_s: float = 600.0
    piece_bytes: int = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        _check_positive("timeout_s", self.timeout_s)
        _check_positive("piece_bytes", self.piece_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        timeout_s: how long a rank waits for the others at each meeting point, in seconds.
        verify: check the digest of every block that is read.
        threads: reads under way at once; each may hold a buffer of 8 MiB.
    """

    timeout_s: float = 600.0
    verify: bool = True
    threads: int = 4

    def __post_init__(self) -> None:
        _check_positive("timeout_s", self.timeout_s)
        _check_positive("threads", self.threads)


def _check_positive(name: str, value: float) -> None:
    if value <= 0:
        raise DeclarationError(f"{name} is {value}; give a number above 0.")
