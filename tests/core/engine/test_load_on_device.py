"""Tensors that are not in host memory can be left where they are: the result then holds others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megackpt import DeclarationError, LoadOptions, ShardedLayout, ShardedTensor, load, save

VALUES = torch.arange(12.0).reshape(4, 3)
HOST = LoadOptions(load_on_device=False)


def test_a_model_on_the_meta_device_gets_tensors_in_host_memory(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", VALUES)}, tmp_path)
    model = torch.nn.Linear(3, 4, bias=False, device="meta")
    asked = {"weight": ShardedTensor.from_rank_offsets("w", model.weight)}
    loaded = load(asked, tmp_path, options=HOST)
    assert model.weight.is_meta
    model.load_state_dict(loaded, assign=True)
    assert torch.equal(model.weight, VALUES)
    with pytest.raises(
        DeclarationError, match=r"meta device.*to_empty.*LoadOptions\(load_on_device=False\).*assign=True"
    ):
        load(
            asked | {"weight": ShardedTensor.from_rank_offsets("w", torch.empty(4, 3, device="meta"))},
            tmp_path,
        )


def test_a_meta_tensor_to_save_raises_an_error_without_advice_for_loads(tmp_path: Path) -> None:
    tensor = ShardedTensor.from_rank_offsets("w", torch.empty(4, 3, device="meta"))
    with pytest.raises(DeclarationError, match=r"'w': .*meta device.*to_empty") as caught:
        save({"w": tensor}, tmp_path)
    assert "load_on_device" not in str(caught.value)


def test_tensors_in_host_memory_are_still_filled_in_place(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", VALUES)}, tmp_path)
    target = torch.zeros(4, 3)
    loaded = load({"w": ShardedTensor.from_rank_offsets("w", target)}, tmp_path, options=HOST)
    assert loaded["w"] is target
    assert torch.equal(target, VALUES)


def test_layouts_are_loaded_there_too(tmp_path: Path) -> None:
    def declare(data: torch.Tensor) -> ShardedLayout:
        return ShardedLayout.split("w", data, 0, {"up": 2, "gate": 2})

    save({"w": declare(VALUES)}, tmp_path)
    loaded = load({"w": declare(torch.empty(4, 3, device="meta"))}, tmp_path, options=HOST)
    assert torch.equal(loaded["w"], VALUES)
