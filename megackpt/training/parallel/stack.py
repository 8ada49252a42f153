"""A stack of layers. Some of them are on this pipeline stage.

The checkpoint does not depend on which stage has a layer: the keys have global layer indices, either in a
leading axis or in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast, overload

from torch import Tensor, nn

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule, sharded_state_dict


class LayerStack(ShardedModule):
    """Layers `owned` of a stack of `total`, applied in order. As collective as its layers.

    Length, iteration and indices are those of the layers of this stage. Names in the state dict count the
    layers of this stage (`0.weight`). In the checkpoint, layers of equal structure have one key for each
    tensor (`weight`) with a leading axis of `total` layers. Layers that may differ, such as dense layers and
    mixtures of experts, have keys of their own (`7.weight` for global layer 7) without that axis.

    Args:
        build: returns the layer with a global index.
        owned: global indices of the layers of this stage, in order; see `StageTable`.
        total: number of layers over all stages.
        groups: the ranks around this one.
        homogeneous: whether all layers have equal structure, also those of other stages.

    Source: the keys are those of Megatron-Core `TransformerBlock.sharded_state_dict`.
    """

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        owned: Sequence[int],
        total: int,
        groups: ParallelGroups,
        *,
        homogeneous: bool = True,
    ) -> None:
        super().__init__(groups)
        self.homogeneous = homogeneous
        self.owned = tuple(owned)
        self.total = total
        for local, index in enumerate(owned):
            self.add_module(str(local), build(index))

    def __len__(self) -> int:
        """Return the number of layers of this stage."""
        return len(self.owned)

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers of this stage, in order."""
        return self.children()

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        """Return a layer of this stage by its local index: layer `owned[index]` of the model; or a slice."""
        return list(self)[index]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers of this stage to `x`."""
        for layer in self.children():
            x = cast(Tensor, layer(x))
        return x

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare this stage's layers; equal ones along a leading axis after `sharded_offsets`. Local."""
        result: ShardedStateDict = {}
        for (local, layer), index in zip(self.named_children(), self.owned, strict=True):
            key_prefix, offsets = f"{prefix}{index}.", tuple(sharded_offsets)
            if self.homogeneous:
                key_prefix, offsets = prefix, (*offsets, (len(offsets), index, self.total))
            entities = sharded_state_dict(layer, self.groups, key_prefix, offsets, metadata)
            result |= {f"{prefix}{local}.{name[len(key_prefix) :]}": e for name, e in entities.items()}
        return result
