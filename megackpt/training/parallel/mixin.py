"""How a module declares which parts of the checkpoint it has.

A layer declares its sharding in one line and never computes an offset. `sharded_state_dict` combines the
declarations over a tree of modules.

    class Scale(ShardedModule):
        tp_sharding = {"weight": 0}                      # dim 0 is cut over tp

        def __init__(self, features, groups):
            super().__init__(groups)
            self.weight = nn.Parameter(torch.ones(features // groups.tp.size))

A layer that has a stack of experts declares the dim over the experts, too. tp is then that of the experts,
`groups.etp`, and the dim is cut over `groups.ep`:

    class Experts(ShardedModule):
        expert_axis = {"weight": 0}                      # [experts/ep, out/etp, in]
        tp_sharding = {"weight": 1}

Replica ids are `(copy, tp, dp)`: a second copy of the same weight in the same model (tied embedding) has
copy 1, a tensor that tp does not cut has its tp rank, and every rank with the same weights its number among
them: the rank in `groups.dp_cp`, or in `groups.edp` for experts. If several neighbours in tp have the same
slice, the second element counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megackpt.entities import (
    ComponentPlacement,
    RankOffset,
    ShardedBase,
    ShardedLayout,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import RowRange, is_marked, mark, mark_copied_rows
from megackpt.training.parallel.foreign_modules import Metadata, declaration_of
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.tp_sharding import Declarations, TpSharding, as_sharding


class ShardedModule(nn.Module):
    """A module whose `sharded_state_dict` follows from a declaration.

    Subclass it, or put it before a module class:

        class RowCutLinear(ShardedModule, nn.Linear):
            tp_sharding = {"weight": 0, "bias": 0}

        RowCutLinear(groups, 16, 8)                      # arguments after groups are those of nn.Linear

    Attributes:
        groups: the ranks around this one.
        tp_sharding: how tp cuts the module's own parameters and persistent buffers, by name. Others are equal
            on all ranks of tp. A class attribute, or an argument of the constructor if it depends on sizes.
        expert_axis: the dim over the experts, for each own tensor that has one, by name. It is cut over
            `groups.ep`, and what `tp_sharding` declares for such a tensor is cut over `groups.etp`.

    Parameters are marked for the optimizer when they are assigned: `tensor_model_parallel` if they are named
    in tp_sharding, `expert_parallel` if they are named in expert_axis or the module was made with
    `groups.experts`, and `stacked_experts` if they are named in expert_axis.
    """

    groups: ParallelGroups
    tp_sharding: Declarations = {}  # noqa: RUF012 - read-only by its type; subclasses replace it
    expert_axis: Mapping[str, int] = {}

    def __init__(
        self, groups: ParallelGroups, *args: Any, tp_sharding: Declarations | None = None, **kwargs: Any
    ) -> None:
        # Before super().__init__, which may assign parameters.
        self.groups = groups
        if tp_sharding is not None:
            self.tp_sharding = tp_sharding
        super().__init__(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, as nn.Module does, and mark it if the declaration says that tp cuts it. Local."""
        super().register_parameter(name, param)
        if param is None:
            return
        is_expert = name in self.expert_axis or self.groups.for_experts
        if is_expert:
            mark(param, "expert_parallel")
        if name in self.expert_axis:
            mark(param, "stacked_experts")
        if name in self.tp_sharding:
            mark(param, "tensor_model_parallel")
            tp = self.groups.etp if is_expert else self.groups.tp
            sharding = as_sharding(self.tp_sharding[name])
            if 0 <= sharding.dim < param.dim():  # if not, sharded_state_dict raises an error
                shared = sharding.shared_rows(param.shape[sharding.dim])
                copied = [RowRange(sharding.dim, a, b) for a, b, copies in shared if tp.rank % copies]
                if copied:
                    mark_copied_rows(param, copied)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare what this rank has of this module and its children; see `declare_module`. Local."""
        return declare_module(
            self,
            self.groups,
            prefix,
            sharded_offsets,
            metadata,
            tp_sharding=self.tp_sharding,
            expert_axis=self.expert_axis,
        )


def sharded_state_dict(
    module: nn.Module,
    groups: ParallelGroups,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Metadata = None,
) -> ShardedStateDict:
    """Declare what this rank has of any `module`. Local.

    Calls the module's own `sharded_state_dict` if it has one, or else the function that was registered for
    the package of its class (see `register_package`). Any other module is taken as equal on all ranks of tp,
    and its children are treated in the same way. Arguments and errors are those of `declare_module`.
    """
    method = getattr(module, "sharded_state_dict", None)
    if method is None:
        declare = declaration_of(module) or declare_module
        return declare(module, groups, prefix, sharded_offsets, metadata)
    declared: ShardedStateDict = method(
        prefix=prefix, sharded_offsets=tuple(sharded_offsets), metadata=metadata
    )
    return declared


def declare_module(
    module: nn.Module,
    groups: ParallelGroups,
    prefix: str = "",
    sharded_offsets: Sequence[RankOffset] = (),
    metadata: Metadata = None,
    *,
    tp_sharding: Declarations | None = None,
    expert_axis: Mapping[str, int] | None = None,
) -> ShardedStateDict:
    """Declare what this rank has of `module`, by `tp_sharding` and `expert_axis`, and of its children. Local.

    This is what `ShardedModule.sharded_state_dict` does, for a module class that cannot derive from it. The
    module's own `sharded_state_dict` is not called; those of its children are. A child without one is taken
    as equal on all ranks of tp.

    Parameters, persistent buffers and extra state are declared. The dict is flat, with the names of
    `module.state_dict()` after `prefix`; a loaded one can be given to `load_state_dict`. Entities wrap the
    parameters themselves, so that an optimizer finds the entity of a parameter by identity.

    Args:
        module: any module.
        groups: the ranks around this one.
        prefix: of every name and key.
        sharded_offsets: `(axis, index, fragments)` of leading axes before the tensors' own (a stack of
            layers), for axes 0, 1, ...
        metadata: passed to children.
        tp_sharding: how tp cuts `module`'s own tensors, by name.
        expert_axis: the dim over the experts of `module`'s own tensors that have one, by name.

    Raises:
        DeclarationError: a declared name is not a parameter or persistent buffer of the module; its dim does
            not exist, or is both that of tp and that of the experts; a parameter marked
            `tensor_model_parallel` is not declared; sharded_offsets are not those of the leading axes.

    Source: Megatron-Core `transformer.utils.sharded_state_dict_default` and
    `MegatronModule.sharded_state_dict`.
    """
    declared = {} if tp_sharding is None else tp_sharding
    expert_dims = {} if expert_axis is None else expert_axis
    stack = _leading_axes(prefix, sharded_offsets)
    own = _own_state(module)
    _check_declarations(module, prefix, own, declared, expert_dims)
    result: ShardedStateDict = {}
    for name, value in own.items():
        if name in expert_dims:
            of_experts = (expert_dims[name] + len(stack), groups.ep.rank, groups.ep.size)
            entity = declare_tensor(
                prefix + name, value, declared.get(name), groups.experts, stack, (*stack, of_experts)
            )
        else:
            entity = declare_tensor(prefix + name, value, declared.get(name), groups, stack, stack)
        result[prefix + name] = entity
    for name, child in module.named_children():
        result.update(sharded_state_dict(child, groups, f"{prefix}{name}.", stack, metadata))
    return result


def second_copy(entity: ShardedTensor, key: str) -> ShardedTensor:
    """Declare the parameter of `entity` as a second copy of the array `key`. Local.

    For a weight that the model has twice (a tied embedding on the first and last pipeline stage): the first
    copy is saved, and both are loaded. The replica id of the second one begins with 1 instead of 0.

    Raises:
        DeclarationError: the entity has no data, or no `(copy, tp, dp)` replica id.
    """
    replica_id = entity.replica_id
    if entity.data is None or not isinstance(replica_id, tuple) or len(replica_id) != 3:
        raise DeclarationError(
            f"{entity.key!r} cannot be declared as a copy of {key!r}: it has replica id {replica_id} and "
            f"data of type {type(entity.data).__name__}. Pass an entity as sharded_state_dict() returned it.",
            key=entity.key,
        )
    return entity.retarget(key=key, data=entity.data, replica_id=(1, *replica_id[1:]))


def _own_state(module: nn.Module) -> dict[str, Any]:
    """Return the module's own entries of its state dict: parameters and buffers themselves, extra state."""
    own: dict[str, Any] = {}
    # Not state_dict(), which includes the children. Modules override this method to change what they store.
    module._save_to_state_dict(own, "", True)
    return own


def declare_tensor(
    key: str,
    value: Any,
    declared: int | TpSharding | None,
    groups: ParallelGroups,
    stack: tuple[RankOffset, ...],
    cuts: tuple[RankOffset, ...],
) -> ShardedBase:
    """Declare one tensor or extra state of a module. Local.

    Args:
        key: its key.
        value: the tensor, or the module's extra state, which becomes a `ShardedObject`.
        declared: how tp cuts it; None if it is equal on all ranks of tp.
        groups: the ranks around this one; `groups.experts` for a tensor of experts.
        stack: `(axis, index, fragments)` of the leading axes that the tensor lacks.
        cuts: the same, of all axes that something else than tp cuts: those of `stack`, and an axis of the
            tensor itself over the experts.
    """
    replicated = (0, groups.tp.rank, groups.dp_cp.rank)
    if not isinstance(value, Tensor):
        shape, offset = tuple(n for _, _, n in stack) or (1,), tuple(i for _, i, _ in stack) or (0,)
        return ShardedObject(key, value, shape, offset, replica_id=replicated)
    if declared is None:
        return ShardedTensor.from_rank_offsets(
            key, value, *cuts, replica_id=replicated, prepend_axis_num=len(stack)
        )
    return _declare_cut(key, value, as_sharding(declared), groups, stack, cuts)


def _declare_cut(
    key: str,
    value: Tensor,
    sharding: TpSharding,
    groups: ParallelGroups,
    stack: tuple[RankOffset, ...],
    cuts: tuple[RankOffset, ...],
) -> ShardedBase:
    """Declare a tensor that tp cuts; the arguments are those of `declare_tensor`."""
    placements = {
        name: _placement(key, sharding.dim + len(stack), sharding.copies_of(name), groups, cuts)
        for name in sharding.components or [""]
    }
    if sharding.components is not None:
        return ShardedLayout.split(
            key,
            value,
            sharding.dim,
            sharding.components,
            replica_id=(0, 0, groups.dp_cp.rank),
            prepend_axis_num=len(stack),
            placements=placements,
        )
    tensor = ShardedTensor.from_rank_offsets(
        key,
        value,
        *placements[""].rank_offsets,
        replica_id=(0, groups.tp.rank % sharding.copies_of(""), groups.dp_cp.rank),
        prepend_axis_num=len(stack),
        allow_shape_mismatch=sharding.allow_shape_mismatch,
    )
    if sharding.unpadded_extent is None:
        return tensor
    axis, whole = sharding.dim + len(stack), tensor.global_shape
    return replace(tensor, unpadded_shape=(*whole[:axis], sharding.unpadded_extent, *whole[axis + 1 :]))


def check_copies(what: str, copies: int, groups: ParallelGroups) -> None:
    """Check that tp can be divided into sets of `copies` neighbours with the same slice of `what`.

    Raises:
        DeclarationError: tp is not a multiple of `copies`.
    """
    if copies < 1 or groups.tp.size % copies:
        raise DeclarationError(
            f"{what}: {copies} neighbouring ranks cannot have the same slice each with tp={groups.tp.size}. "
            f"Give a number of copies that divides tp.",
            rank=groups.rank,
        )


def _placement(
    key: str, axis: int, copies: int, groups: ParallelGroups, others: tuple[RankOffset, ...]
) -> ComponentPlacement:
    """Return the placement of this rank's slice along an axis, which `copies` neighbours in tp have."""
    check_copies(repr(key), copies, groups)
    tp = groups.tp
    cut = (axis, tp.rank // copies, tp.size // copies)
    return ComponentPlacement((cut, *others), replica_id=(0, tp.rank % copies, 0))


def _leading_axes(prefix: str, sharded_offsets: Sequence[RankOffset]) -> tuple[RankOffset, ...]:
    stack = tuple(sorted(sharded_offsets))
    if [axis for axis, _, _ in stack] != list(range(len(stack))):
        raise DeclarationError(
            f"{prefix!r}: sharded_offsets {stack} do not describe axes 0 to {len(stack) - 1}. Give one "
            f"(axis, index, fragments) for each leading axis before the tensors' own; what tp cuts "
            f"belongs into tp_sharding.",
            path=prefix,
        )
    return stack


def _check_declarations(
    module: nn.Module,
    prefix: str,
    own: Mapping[str, Any],
    declared: Declarations,
    expert_dims: Mapping[str, int],
) -> None:
    kind = type(module).__name__
    for name, sharding in declared.items():
        _check_dim(module, prefix, own, name, as_sharding(sharding).dim, "tp_sharding")
    for name, dim in expert_dims.items():
        _check_dim(module, prefix, own, name, dim, "expert_axis")
        if name in declared and as_sharding(declared[name]).dim == dim:
            raise DeclarationError(
                f"{prefix + name!r}: {kind} declares dim {dim} both in tp_sharding and in expert_axis. Give "
                f"the experts a dim of their own, as in [experts, out, in].",
                key=prefix + name,
            )
    for name, value in own.items():
        if isinstance(value, Tensor) and is_marked(value, "tensor_model_parallel") and name not in declared:
            raise DeclarationError(
                f"{prefix + name!r}: the parameter is marked tensor_model_parallel but {kind}.tp_sharding "
                f"does not say which dim tp cuts; stored as it is, the slices of the tp ranks would "
                f"overwrite each other. Declare it: tp_sharding = {{{name!r}: dim}}.",
                key=prefix + name,
            )


def _check_dim(
    module: nn.Module, prefix: str, own: Mapping[str, Any], name: str, dim: int, declaration: str
) -> None:
    """Raise an error if a declared tensor, or the dim of it that is declared, does not exist."""
    value = own.get(name)
    if value is None and getattr(module, name, module) is None:
        return  # declared for all instances; this one does not have it (bias=False)
    kind = type(module).__name__
    if not isinstance(value, Tensor):
        raise DeclarationError(
            f"{prefix + name!r}: {kind}.{declaration} declares {name!r}, which is not a parameter or "
            f"persistent buffer of it; it has {_listed(own)}. Correct the name, or remove the declaration.",
            key=prefix + name,
        )
    if not 0 <= dim < value.dim():
        raise DeclarationError(
            f"{prefix + name!r}: {kind}.{declaration} cuts dim {dim} of a tensor of shape "
            f"{tuple(value.shape)}. Give a dim from 0 to {value.dim() - 1}.",
            key=prefix + name,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
