"""FP8 state as versions of Transformer Engine pickled it, without Transformer Engine."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def as_torch_save(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream
