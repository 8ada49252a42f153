"""What a program has asked of the Megatron-Core face as a whole, by `install()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ProcessOptions:
    """Options that no signature of Megatron-Core has a place for.

    Attributes:
        silent_cast: a load converts values that are stored in another dtype, as Megatron-Core does, where
            megackpt raises an error.
    """

    silent_cast: bool = False


OPTIONS = ProcessOptions()
"""Those of this process."""
