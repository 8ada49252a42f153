"""Tensors in plain pickles: those that torch writes load bit for bit, and forged ones are errors."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from megackpt import FormatError
from megackpt.formats.tensor_pickle import load_tensor_pickle

BASE = torch.arange(12.0).view(3, 4)
STORAGE = torch.arange(6, dtype=torch.int16)._typed_storage()  # type: ignore[no-untyped-call]


class Rebuilt:
    """Is pickled as a tensor with these arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (*self.args, False, OrderedDict())


@pytest.mark.parametrize(
    "tensor",
    {
        "whole": BASE,
        "turned": BASE.t(),
        "a part": BASE[1:, 1:3],
        "the last element": BASE[2, 3],
        "every other column": BASE[:, ::2],
        "repeated": BASE[0].expand(5, 4),
        "empty": BASE[3:],
        "bf16": BASE.bfloat16(),
        "bool": BASE > 3,
    }.values(),
)
def test_a_tensor_of_torch_loads_bit_for_bit(tensor: torch.Tensor) -> None:
    loaded = load_tensor_pickle(pickle.dumps({"t": [tensor]}), [], where="w")["t"][0]
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(loaded, tensor)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((STORAGE, 0, (7,), (1,)), "beyond its storage"),
        ((STORAGE, 1, (6,), (1,)), "beyond its storage"),
        ((STORAGE, 0, (2, 3), (4, 1)), "beyond its storage"),
        ((STORAGE, 6, (), ()), "beyond its storage"),
        ((STORAGE, -1, (2,), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (-2,), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (2,), (-1,)), "negative or missing extent"),
        ((STORAGE, 0, (2, 3), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (2.0,), (1,)), "negative or missing extent"),
        ((BASE, 0, (2,), (1,)), "a tensor in a Tensor"),
        ((b"", 0, (2,), (1,)), "a tensor in a bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_an_error(args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(FormatError, match=rf"^w: the pickle cannot be loaded .*{why}"):
        load_tensor_pickle(pickle.dumps(Rebuilt(*args)), [], where="w")


@pytest.mark.parametrize("extent", [(6,), (2, 3)])
def test_a_tensor_may_end_where_its_storage_does(extent: tuple[int, ...]) -> None:
    stride = (1,) if len(extent) == 1 else (3, 1)
    loaded = load_tensor_pickle(pickle.dumps(Rebuilt(STORAGE, 0, extent, stride)), [], where="w")
    assert torch.equal(loaded, torch.arange(6, dtype=torch.int16).view(extent))
    beyond = load_tensor_pickle(pickle.dumps(Rebuilt(STORAGE, 6, (0, 3), (3, 1))), [], where="w")
    assert beyond.shape == (0, 3)
