"""The place of a module in a model, and what it knows about its own sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from megackpt.contrib.transformer_engine.names import Names, canonical_key, check_names
from megackpt.contrib.transformer_engine.quantised import (
    Quantised,
    check_quantised,
    declare_quantised,
    without_codes,
)
from megackpt.entities import RankOffset, ShardedBase, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel import ParallelGroups, TpSharding
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.mixin import declare_tensor

ParallelMode: TypeAlias = Literal["column", "row"]
# The keys of the caller's choices in metadata.
NAMES = "transformer_engine_names"
QUANTISED = "transformer_engine_quantised"

_MODE = "checkpoint_parallel_mode"
_COMPONENTS = "checkpoint_components"
_BLOCK = "checkpoint_components_block"


class OwnTensor(NamedTuple):
    """A parameter or buffer of a module: its name there, its name in keys, and how tp cuts it."""

    name: str
    key: str
    sharding: int | TpSharding | None


@dataclass(frozen=True)
class Site:
    """Where a module is.

    Attributes:
        groups: the ranks around this one.
        prefix: of the module's keys.
        stack: `(axis, index, fragments)` of the leading axes that its tensors lack.
        metadata: hints of the caller.
    """

    groups: ParallelGroups
    prefix: str
    stack: tuple[RankOffset, ...]
    metadata: Metadata

    @property
    def names(self) -> Names:
        """Which of several names of a tensor the caller wants."""
        return check_names((self.metadata or {}).get(NAMES, "canonical"))

    @property
    def quantised(self) -> Quantised:
        """What the caller wants to be stored of quantised parameters."""
        return check_quantised((self.metadata or {}).get(QUANTISED, "values"))

    def below(self, name: str) -> Site:
        """Return the place of a child whose keys begin with `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def key(self, name: str) -> str:
        """Return the key of a tensor of the module here."""
        key = self.prefix + name
        return canonical_key(key) if self.names == "canonical" else key

    def declare(self, name: str, value: Tensor, sharding: int | TpSharding | None) -> ShardedBase:
        """Declare a tensor of the module here."""
        return self.declare_in(self.stack, name, value, sharding)

    def declare_in(
        self, axes: tuple[RankOffset, ...], name: str, value: Tensor, sharding: int | TpSharding | None
    ) -> ShardedBase:
        """Declare a tensor with the leading axes `axes`, which it lacks."""
        plain = declare_tensor(self.key(name), without_codes(value), sharding, self.groups, axes, axes)
        return self.declare_codes(axes, plain, value, is_cut=is_cut(sharding))

    def declare_codes(
        self,
        axes: tuple[RankOffset, ...],
        plain: ShardedBase,
        value: Tensor,
        *,
        is_cut: bool,
        in_group: bool = False,
    ) -> ShardedBase:
        """Return the declaration of a parameter that may be quantised; see `declare_quantised`."""
        tp = self.groups.tp
        over_tp = (len(axes), tp.rank, tp.size) if is_cut else (len(axes), 0, 1)
        return declare_quantised(plain, value, self.quantised, (*axes, over_tp), in_group=in_group)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and persistent buffers, themselves, by name."""
    buffers = module._non_persistent_buffers_set
    own = {**module._parameters, **{n: b for n, b in module._buffers.items() if n not in buffers}}
    return {name: value for name, value in own.items() if value is not None}


def renamed(state: ShardedStateDict, old: str, new: str) -> ShardedStateDict:
    """Return a state dict whose names begin with `new` instead of `old`; keys of entities stay."""
    return {new + name[len(old) :]: entity for name, entity in state.items()}


def set_parallel_mode(module: nn.Module, mode: ParallelMode | None) -> None:
    """Say how tp cuts a module that was built without TE's own tensor parallelism. Local.

    Args:
        module: a linear module, or a grouped one.
        mode: "column" for outputs cut over tp, "row" for inputs; None if all ranks of tp have it whole.
    """
    setattr(module, _MODE, mode)


def set_components(module: nn.Module, *names: str, block: int | None = None) -> None:
    """Say that the output of a linear module is several equal parts, one after the other. Local.

    Each is stored as an array of its own, `weight.gate` and `weight.up`. Without it, a fused projection that
    tp cuts by columns cannot be loaded at another tp: every rank has a slice of each part.

    Args:
        module: a linear module, or a grouped one.
        names: of the parts, in order.
        block: if the parts alternate, the number of rows of a part before the next one begins
            (Megatron-Core's `moe_mlp_glu_interleave_size`). The stored arrays have their rows in order.
    """
    setattr(module, _COMPONENTS, names)
    setattr(module, _BLOCK, block)


def alternating_parts(module: nn.Module) -> dict[str, int] | None:
    """Return the parts that alternate in a module's rows, with the rows of each; None if none do."""
    block: int | None = getattr(module, _BLOCK, None)
    return None if block is None else dict.fromkeys(getattr(module, _COMPONENTS), block)


def parallel_mode(module: nn.Module, site: Site) -> ParallelMode | None:
    """Return how tp cuts a linear module.

    Raises:
        DeclarationError: it was built for another number of ranks than tp has.
    """
    if hasattr(module, _MODE):
        mode: ParallelMode | None = getattr(module, _MODE)
        return mode
    mode = getattr(module, "parallel_mode", None) or getattr(module, "tensor_parallel_mode", None)
    if mode is not None:
        check_tp_size(module, site)
    return mode


def check_tp_size(module: nn.Module, site: Site) -> None:
    """Check that a module was built for as many ranks as tp has here.

    Raises:
        DeclarationError: it was not.
    """
    size = getattr(module, "tp_size", getattr(module, "tensor_parallel_size", 1))
    if size != site.groups.tp.size:
        axis = "etp" if site.groups.for_experts else "tp"
        raise DeclarationError(
            f"{site.prefix!r}: this {type(module).__name__} has tp_size {size}, but {axis} has "
            f"{site.groups.tp.size} ranks here. Build it with tp_size={site.groups.tp.size}, or call "
            f"megackpt.contrib.transformer_engine.set_parallel_mode(module, None) if every rank has "
            f"all of it.",
            key=site.prefix,
            rank=site.groups.rank,
        )


def linear_sharding(
    module: nn.Module,
    kind: str,
    rows: int,
    mode: ParallelMode | None,
    site: Site,
    parts: Sequence[str] | None = None,
) -> int | TpSharding | None:
    """Return the sharding of the weight or bias of a linear module.

    Args:
        module: the module.
        kind: "weight" or "bias".
        rows: the number of local output rows.
        mode: how tp cuts the module.
        site: where it is.
        parts: its equal components; None for those set by `set_components`.

    Raises:
        DeclarationError: the rows are not a multiple of the components.
    """
    if mode == "row":
        return 1 if kind == "weight" else None
    names: Sequence[str] = getattr(module, _COMPONENTS, ()) if parts is None else parts
    if not names:
        return 0 if mode == "column" else None
    if rows % len(names):
        raise DeclarationError(
            f"{site.prefix!r}: a {type(module).__name__} has {rows} rows on this rank, which are not "
            f"{len(names)} equal components {list(names)}. Give set_components() the parts that it has.",
            key=site.prefix,
        )
    return components(dict.fromkeys(names, rows // len(names)), site, mode == "column")


def is_cut(sharding: int | TpSharding | None) -> bool:
    """Return whether every rank of tp has another part of a tensor."""
    return isinstance(sharding, int) or (sharding is not None and sharding.copies == 1)


def components(sizes: Mapping[str, int], site: Site, is_cut: bool) -> TpSharding:
    """Return the sharding of dim 0 into named components with these local extents."""
    # What tp does not cut is the same slice, the whole, on all ranks of tp.
    return TpSharding(dim=0, components=sizes, copies=1 if is_cut else site.groups.tp.size)
