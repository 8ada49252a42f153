"""A stack of layers. Some of them are on this pipeline stage.

The checkpoint does not depend on which stage has a layer: the keys have global layer indices, either in a
leading axis or in their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, cast, overload

from torch import Tensor, nn

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule, sharded_state_dict

Axes: TypeAlias = tuple[RankOffset, ...]
"""Leading axes of arrays, over layers and experts: number of the axis, position, extent."""


class ModuleSequence(ShardedModule):
    """Modules of this rank in order. Length, iteration and indices are those of the modules.

    Names in the state dict count the modules (`0.weight`). A subclass gives them keys by
    `keys_and_axes`.

    Args:
        modules: the modules, in order.
        groups: the ranks around this one.
        inner_groups: the same, as the modules see them; None for `groups`.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        groups: ParallelGroups,
        *,
        inner_groups: ParallelGroups | None = None,
    ) -> None:
        super().__init__(groups)
        self._inner_groups = groups if inner_groups is None else inner_groups
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def __len__(self) -> int:
        """Return the number of modules."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the modules, in order."""
        return self.children()

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        """Return a module by its number, or several by a slice."""
        return list(self)[index]

    def keys_and_axes(self, number: int, prefix: str, axes: Axes) -> tuple[str, Axes]:
        """Return the begin of the keys of a module, and its leading axes, from those of the sequence."""
        return prefix, axes

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare the modules of this rank, each at its place. Local."""
        result: ShardedStateDict = {}
        for number, module in enumerate(self):
            begin, axes = self.keys_and_axes(number, prefix, tuple(sharded_offsets))
            entities = sharded_state_dict(module, self._inner_groups, begin, axes, metadata)
            result |= {f"{prefix}{number}.{name[len(begin) :]}": e for name, e in entities.items()}
        return result


class LayerStack(ModuleSequence):
    """Layers `owned` of a stack of `total`, applied in order. As collective as its layers.

    Names in the state dict count the layers of this stage (`0.weight`). In the checkpoint, layers of equal
    structure have one key for each tensor (`weight`) with a leading axis of `total` layers. Layers that may
    differ, such as dense layers and mixtures of experts, have keys of their own (`7.weight` for global layer
    7) without that axis.

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
        super().__init__(map(build, owned), groups)
        self.homogeneous = homogeneous
        self.owned = tuple(owned)
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers of this stage to `x`."""
        for layer in self.children():
            x = cast(Tensor, layer(x))
        return x

    def keys_and_axes(self, number: int, prefix: str, axes: Axes) -> tuple[str, Axes]:
        """Return keys without a number and an axis over the layers, or keys with the number of the layer."""
        index = self.owned[number]
        if self.homogeneous:
            return prefix, (*axes, (len(axes), index, self.total))
        return f"{prefix}{index}.", axes
