"""A stack of equal layers, some of which are on this pipeline stage.

In the checkpoint every tensor of the stack has a leading axis over all layers of the model, so that the
checkpoint does not depend on which stage has a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast, overload

from torch import Tensor, nn

from megackpt.mapping import RankOffset, ShardedStateDict
from megackpt.parallel.groups import ParallelGroups
from megackpt.parallel.mixin import Metadata, ShardedModule, sharded_state_dict


class LayerStack(ShardedModule):
    """Layers `owned` of a stack of `total`, applied in order. As collective as its layers.

    Length, iteration and indices are those of the layers of this stage. Names in the state dict count the
    layers of this stage (`0.weight`); the checkpoint has one key for each tensor (`weight`), with a leading
    axis of `total` layers.

    Args:
        build: returns the layer with a global index.
        owned: global indices of the layers of this stage, in order; see `StageTable`.
        total: number of layers over all stages.
        groups: the ranks around this one.
    """

    def __init__(
        self, build: Callable[[int], nn.Module], owned: Sequence[int], total: int, groups: ParallelGroups
    ) -> None:
        super().__init__(groups)
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
        """Declare this stage's layers, stacked along a leading axis after `sharded_offsets`. Local."""
        result: ShardedStateDict = {}
        axis = len(sharded_offsets)
        for (local, layer), index in zip(self.named_children(), self.owned, strict=True):
            stacked = (*sharded_offsets, (axis, index, self.total))
            entities = sharded_state_dict(layer, self.groups, prefix, stacked, metadata)
            result |= {f"{prefix}{local}.{name[len(prefix) :]}": e for name, e in entities.items()}
        return result
