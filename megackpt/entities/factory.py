"""ShardedTensorFactory: a tensor that functions of the user transform before saving and after loading.

Declare fused gate/up and QKV weights as a `ShardedLayout` instead: it also works for flat optimizer shards,
and loads in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megackpt.entities.base import (
    Expansion,
    ReplicaId,
    ShardedBase,
    check_key,
    check_replica_id,
    declaration_error,
)
from megackpt.entities.sharded_layout import ShardedLayout
from megackpt.entities.sharded_tensor import ShardedTensor

BuildFn = Callable[[str, Any, ReplicaId, "slice | None"], Any]  # returns an entity or a list/dict of them
MergeFn = Callable[[Any], Any]  # the same structure with loaded tensors -> the local tensor


@dataclass(eq=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor that is stored as the sharded state dict that `build_fn` makes of it.

    Attributes:
        key: passed to `build_fn`.
        data: the local tensor; passed to `build_fn`.
        build_fn: `(key, data, replica_id, flattened_range) -> sharded state dict`. It must depend on nothing
            else, because it is also applied to optimizer states of the same parameter.
        merge_fn: takes the result of `build_fn` with every entity replaced by its loaded value, and returns
            the local tensor.
        replica_id: passed to `build_fn`.
        flattened_range: which slice of the flattened tensor data is, or None; passed to `build_fn`.
        of_states: how optimizer states of the same parameter are sharded, if not by this factory; it needs no
            data.
        how: what a load makes of the stored arrays, for `LoadReport.transformed`; empty for nothing to say.
        advice: what to do if the checkpoint does not have its arrays in these shapes, for the error; a whole
            sentence, or empty.

    Raises:
        DeclarationError: there is no key, or build_fn or merge_fn is not callable.

    Source: Megatron-Core `dist_checkpointing.mapping.ShardedTensorFactory`.
    """

    key: str
    data: torch.Tensor | None
    build_fn: BuildFn
    merge_fn: MergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None
    of_states: ShardedTensor | ShardedLayout | None = field(default=None, kw_only=True)
    how: str = field(default="", kw_only=True)
    advice: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        check_key(self.key, "ShardedTensorFactory")
        check_replica_id(self.key, self.replica_id)
        for name in ("build_fn", "merge_fn"):
            if not callable(getattr(self, name)):
                raise declaration_error(self.key, f"{name} must be a function, not {getattr(self, name)!r}.")

    def build(self) -> Any:
        """Return the sharded state dict that is stored for this tensor; it may contain factories again."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def expand(self, on_host: Callable[[torch.Tensor], torch.Tensor]) -> Expansion:
        """Return what `build_fn` makes of the tensor, with `merge_fn`."""
        return Expansion(parts=self.build(), merge=self.merge_fn, how=self.how, advice=self.advice)

    def without_data(self) -> ShardedTensorFactory:
        """Return the same declaration with `data=None`."""
        return replace(self, data=None)

    def retarget(
        self,
        *,
        key: str,
        data: torch.Tensor,
        replica_id: ReplicaId | None = None,
        flattened_range: slice | None = None,
    ) -> ShardedTensorFactory | ShardedTensor | ShardedLayout:
        """Apply the same factory, or `of_states`, to another tensor; see `ShardedBase.retarget`."""
        if self.of_states is not None:
            return self.of_states.retarget(
                key=key, data=data, replica_id=replica_id, flattened_range=flattened_range
            )
        return replace(
            self,
            key=key,
            data=data,
            replica_id=self.replica_id if replica_id is None else replica_id,
            flattened_range=flattened_range,
        )
