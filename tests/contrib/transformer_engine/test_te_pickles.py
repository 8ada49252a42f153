"""Pickled FP8 state of Transformer Engine is read without running it. Transformer Engine is not needed."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megackpt import FormatError
from megackpt.contrib.transformer_engine import read_extra_state
from megackpt.errors import UnknownClassError
from tests.support.states import PickledCall


def as_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def as_torch_save(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


@pytest.mark.parametrize("data", [None, torch.empty(0, dtype=torch.uint8), as_bytes({}), as_bytes(None)])
def test_no_state_is_none(data: Any) -> None:
    assert read_extra_state(data) is None


def storage_bytes(tensor: Tensor) -> bytes:
    """The bytes of the storage in the pickle of a tensor."""
    strings = [arg for _, arg, _ in pickletools.genops(pickle.dumps(tensor)) if isinstance(arg, bytes)]
    return max(strings, key=len)


@pytest.mark.parametrize("pack", [as_bytes, as_torch_save], ids=["bytes", "torch.save"])
@pytest.mark.parametrize(
    ("attack", "named"),
    [
        (lambda target: PickledCall(os.mkdir, target), "mkdir"),
        (lambda target: PickledCall(eval, f"__import__('os').mkdir({target!r})"), "eval"),
        (lambda target: PickledCall(pickle.loads, pickle.dumps(PickledCall(os.mkdir, target))), "loads"),
        (lambda target: PickledCall(torch.load, target), r"torch\.serialization\.load"),
        (lambda target: PickledCall(getattr, "text", "upper"), "getattr"),
    ],
)
def test_malicious_bytes_are_rejected_and_nothing_runs(
    tmp_path: Path, pack: Any, attack: Any, named: str
) -> None:
    value = {"scale_fwd": torch.ones(3), "extra_fp8_variables": attack(str(tmp_path / "ran"))}
    with pytest.raises((UnknownClassError, FormatError), match=named) as raised:
        read_extra_state(pack(value), where="layers.0._extra_state")
    assert "layers.0._extra_state" in str(raised.value)
    assert not (tmp_path / "ran").exists()


def test_a_storage_inside_of_a_tensor_is_read_with_the_same_care(tmp_path: Path) -> None:
    """`torch.storage._load_from_bytes` itself would load any pickle."""
    inner = as_torch_save(PickledCall(os.mkdir, str(tmp_path / "ran"))).getvalue()
    outer = {"scale_fwd": PickledCall(torch.storage._load_from_bytes, inner)}
    with pytest.raises(UnknownClassError, match=r"posix\.mkdir|nt\.mkdir"):
        read_extra_state(as_bytes(outer))
    assert not (tmp_path / "ran").exists()


def test_a_tensor_beyond_its_storage_is_an_error() -> None:
    storage = PickledCall(torch.storage._load_from_bytes, storage_bytes(torch.ones(3)))
    tensor = PickledCall(torch._utils._rebuild_tensor_v2, storage, 0, (300,), (1,), False, OrderedDict())
    with pytest.raises(FormatError, match="beyond its storage"):
        read_extra_state(as_bytes({"scale_fwd": tensor}))
