"""Megatron-Core's planner of loads, for programs that call torch.distributed.checkpoint themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from megackpt.entities import ShardedTensor
from megackpt.errors import MismatchError, MissingKeyError


class MCoreLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, which also compares global shapes; `megackpt.load` needs no planner.

    Args:
        shapes_validation_sharded_tensors: entities whose global shapes must be the stored ones.
        allow_shape_mismatch_sharded_tensors: entities by key whose arrays may have another shape when stored,
            such as a vocabulary that is padded otherwise; what both have is loaded.

    Source: Megatron-Core `strategies.torch.MCoreLoadPlanner`, for names and behaviour.
    """

    def __init__(
        self,
        *args: Any,
        shapes_validation_sharded_tensors: Iterable[ShardedTensor] = (),
        allow_shape_mismatch_sharded_tensors: Mapping[str, ShardedTensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shapes_validation_sharded_tensors = shapes_validation_sharded_tensors
        self.allow_shape_mismatch_sharded_tensors = allow_shape_mismatch_sharded_tensors

    def create_local_plan(self) -> LoadPlan:
        """Return the plan of this rank, after comparing shapes.

        Raises:
            MissingKeyError: an array that is to be compared is not stored.
            MismatchError: it has another shape.
        """
        stored = self.metadata
        if stored is None:
            return super().create_local_plan()
        self._validate_global_shapes(stored, self.shapes_validation_sharded_tensors)
        self.metadata = self._with_own_shapes(stored)
        try:
            return super().create_local_plan()
        finally:
            self.metadata = stored

    def _validate_global_shapes(self, metadata: Metadata, sharded_tensors: Iterable[ShardedTensor]) -> None:
        for entity in sharded_tensors:
            entry = metadata.state_dict_metadata.get(entity.key)
            if entry is None:
                raise MissingKeyError(
                    f"{entity.key!r} is not stored in the checkpoint. Ask for what was saved.", key=entity.key
                )
            shape = tuple(getattr(entry, "size", ()))
            if shape != tuple(entity.global_shape):
                raise MismatchError(
                    f"{entity.key!r} has the shape {shape} in the checkpoint, and "
                    f"{tuple(entity.global_shape)} here. Build the model with the shapes "
                    f"of the checkpoint, or set allow_shape_mismatch.",
                    key=entity.key,
                )

    def _with_own_shapes(self, metadata: Metadata) -> Metadata:
        """Return the metadata with the shapes of this program where these may differ: torch compares them."""
        entries = dict(metadata.state_dict_metadata)
        for key, entity in (self.allow_shape_mismatch_sharded_tensors or {}).items():
            if key in entries:
                size: Any = torch.Size(entity.global_shape)
                entries[key] = dataclasses.replace(entries[key], size=size)
        return dataclasses.replace(metadata, state_dict_metadata=entries)
