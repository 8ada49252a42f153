"""Values of a checkpoint as text for human readers: one shortened line for each leaf.

Paths are those of `megackpt.codec.leaf_digests`, so that a leaf whose digest differs can be shown.
"""

from __future__ import annotations

import numpy as np
import torch

from megackpt.codec import ArrayReference, leaves

_MOST_CHARACTERS = 120
_MOST_ELEMENTS = 8


def leaves_as_text(value: object) -> dict[str, str]:
    """Return each leaf of a value as text of bounded length, by its path."""
    return {path: leaf_as_text(leaf) for path, leaf in leaves(value).items()}


def leaf_as_text(value: object) -> str:
    """Return a value as text of bounded length; a tensor as its dtype, shape and first elements."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        flat = (value.detach() if isinstance(value, torch.Tensor) else value).reshape(-1)
        first = ", ".join(map(str, flat[:_MOST_ELEMENTS].tolist()))
        kind = "ndarray " if isinstance(value, np.ndarray) else ""
        more = ", ..." if len(flat) > _MOST_ELEMENTS else ""
        text = f"{kind}{value.dtype} {list(value.shape)}: {first}{more}"
    elif isinstance(value, (bytes, bytearray)):
        text = f"{type(value).__name__} of {len(value)}: {bytes(value[:_MOST_ELEMENTS])!r}"
    elif isinstance(value, ArrayReference):
        text = f"array {value.key!r}"
    else:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001 - repr of any class, such as a torch.Size beyond 64 bits
            text = f"{type(value).__name__} that cannot be shown: {error}"
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
