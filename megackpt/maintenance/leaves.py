"""Values of a checkpoint as a person reads them: one line for each leaf, shortened.

Owns the text. Paths are those of `megackpt.codec.leaf_digests`, so that what differs there can be shown.
"""

from __future__ import annotations

import numpy as np
import torch

from megackpt.codec import ArrayReference, leaves

_MOST_CHARACTERS = 120
_MOST_ELEMENTS = 8


def leaves_of(value: object) -> dict[str, str]:
    """Return every leaf of a value, as text of bounded length, by its path."""
    return {path: shown(leaf) for path, leaf in leaves(value).items()}


def shown(value: object) -> str:
    """Return a value as text of bounded length; of a tensor, its shape and first elements."""
    if isinstance(value, torch.Tensor):
        first = value.detach().reshape(-1)[:_MOST_ELEMENTS].tolist()
        more = ", ..." if value.numel() > _MOST_ELEMENTS else ""
        text = f"{value.dtype} {list(value.shape)}: {', '.join(map(str, first))}{more}"
    elif isinstance(value, np.ndarray):
        first = value.reshape(-1)[:_MOST_ELEMENTS].tolist()
        more = ", ..." if value.size > _MOST_ELEMENTS else ""
        text = f"ndarray {value.dtype} {list(value.shape)}: {', '.join(map(str, first))}{more}"
    elif isinstance(value, (bytes, bytearray)):
        text = f"{type(value).__name__} of {len(value)}: {bytes(value[:_MOST_ELEMENTS])!r}"
    elif isinstance(value, ArrayReference):
        text = f"array {value.key!r}"
    else:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001 - a torch.Size beyond 64 bits, for one: torch makes it
            text = f"{type(value).__name__} that cannot be shown: {error}"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
