"""Megatron-Core's entities are recognised by class and fields, without Megatron-Core.

The classes here have the names, module and fields of Megatron-Core's up to 0.15, which had flat shards;
those of 0.16 are tested with its models.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megackpt
from megackpt.entities.megatron_entities import adopt_megatron_entities
from megackpt.entities.recognition import MEGATRON_MODULE
from megackpt.errors import UnserializableError


def _theirs(name: str, *fields: str, **defaults: Any) -> Any:
    """Return a class of Megatron-Core's module with these fields."""
    with_defaults = [(field, Any, dataclasses.field(default=value)) for field, value in defaults.items()]
    made = dataclasses.make_dataclass(name, [*fields, *with_defaults])
    made.__module__ = MEGATRON_MODULE  # from 3.12 on, make_dataclass puts the caller's into a namespace
    return made


ShardedTensor = _theirs(
    "ShardedTensor",
    "key",
    "data",
    "dtype",
    "local_shape",
    "global_shape",
    "global_offset",
    "axis_fragmentations",
    replica_id=0,
    prepend_axis_num=0,
    allow_shape_mismatch=False,
    flattened_range=None,
)
ShardedObject = _theirs("ShardedObject", "key", "data", "global_shape", "global_offset", replica_id=0)
ShardedTensorFactory = _theirs(
    "ShardedTensorFactory", "key", "data", "build_fn", "merge_fn", replica_id=0, flattened_range=None
)
LocalNonpersistentObject = _theirs("LocalNonpersistentObject", "obj")


class Derived(ShardedTensor):  # type: ignore[misc]
    """A user's own class."""


def _flat(key: str, data: torch.Tensor, start: int, kind: Any = ShardedTensor) -> Any:
    return kind(
        key, data, data.dtype, (2, 3), (4, 3), (2, 0), (2, 1), (0, 0, 1), 0, False, slice(start, start + 2)
    )


def test_every_field_is_taken_over_and_tensors_are_shared() -> None:
    data = torch.zeros(2)
    theirs = {"a": [_flat("w", data, 3, Derived)], "b": 1}
    ours = adopt_megatron_entities(theirs)
    entity = ours["a"][0]
    assert type(entity) is megackpt.ShardedTensor
    assert entity.data is data
    assert (entity.global_shape, entity.global_offset) == ((4, 3), (2, 0))
    assert (entity.replica_id, entity.flattened_range) == ((0, 0, 1), slice(3, 5))
    assert isinstance(theirs["a"][0], Derived), "the given tree must stay as it was"


def test_they_are_saved_and_loaded_like_ours(tmp_path: Path) -> None:
    def state(fill: float) -> dict[str, Any]:
        whole = torch.full((4,), fill)

        def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
            return [
                ShardedTensor(f"{key}.{i}", half, half.dtype, (2,), (2,), (0,), (1,), replica_id)
                for i, half in enumerate(data.chunk(2))
            ]

        return {
            "factory": ShardedTensorFactory("f", whole, build, torch.cat),
            "object": ShardedObject("o", {"v": fill}, (1,), (0,)),
            "local": LocalNonpersistentObject("mine"),
            "common": 3,
        }

    megackpt.save(state(2.0), tmp_path / "c")
    loaded = megackpt.load(state(0.0), tmp_path / "c")
    assert loaded["factory"].tolist() == [2.0] * 4
    assert (loaded["object"], loaded["local"], loaded["common"]) == ({"v": 2.0}, "mine", 3)
    assert set(megackpt.load_plain_tensors(tmp_path / "c")) == {"f.0", "f.1"}


def test_an_entity_that_lacks_a_field_raises_an_error_with_its_path() -> None:
    broken = _flat("w", torch.zeros(2), 0)
    del broken.global_offset
    with pytest.raises(
        megackpt.DeclarationError, match=r"model\.w: this ShardedTensor .* no 'global_offset'"
    ) as caught:
        adopt_megatron_entities({"model": {"w": broken}})
    assert (caught.value.key, caught.value.path) == ("w", "model.w")


def test_what_only_looks_similar_is_not_changed() -> None:
    stranger = SimpleNamespace(key="k", data=None, global_shape=(1,), global_offset=(0,))
    assert adopt_megatron_entities({"a": stranger})["a"] is stranger


def test_an_entity_inside_of_a_tuple_raises_an_error_at_save(tmp_path: Path) -> None:
    with pytest.raises(UnserializableError, match="ShardedObject"):
        megackpt.save({"a": (ShardedObject("o", 1, (1,), (0,)),)}, tmp_path / "c")


def test_megatrons_arguments_load_equal(tmp_path: Path) -> None:
    enums = pytest.importorskip("megatron.core.transformer.enums")
    args = argparse.Namespace(
        attention_backend=enums.AttnBackend.flash,
        model_type=enums.ModelType.encoder_or_decoder,
        cuda_graph_scope=[enums.CudaGraphScope.attn, enums.CudaGraphScope.moe_router],
        layer_types=(enums.LayerType.decoder, enums.AttnMaskType.causal, enums.AttnType.self_attn),
        exit_signal=signal.SIGTERM,
        params_dtype=torch.bfloat16,
        shape=torch.Size([2, 3]),
        data_path=[Path("/data"), None],
        betas=(0.9, 0.95),
        rampup_batch_size=None,
    )
    megackpt.save({"args": args, "iteration": 7}, str(tmp_path))
    loaded = megackpt.load({}, str(tmp_path))
    assert loaded["args"] == args
    assert loaded["args"].attention_backend is enums.AttnBackend.flash
    assert loaded["args"].exit_signal is signal.SIGTERM
