"""Where a rank is among those that have slices or copies of one parameter."""

from __future__ import annotations

from torch.nn import Parameter

from megackpt.errors import DeclarationError
from megackpt.training.optim.grad_sync import groups_of
from megackpt.training.optim.sharded_state import ParamEntity, replica_of
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import Axis, ParallelGroups


def cuts_of(param: Parameter, groups: ParallelGroups) -> list[tuple[int, int]]:
    """Return this rank's position along each axis that cuts the parameter, and the axis's size. Local."""
    axes: list[Axis] = []
    if is_marked(param, "stacked_experts"):
        axes.append(groups.ep)
    if is_marked(param, "tensor_model_parallel"):
        axes.append(groups_of(param, groups).tp)
    return [(axis.rank, axis.size) for axis in axes]


def model_replica(param: Parameter, entity: ParamEntity, groups: ParallelGroups) -> tuple[int, int]:
    """Return the replica id of a parameter's entity without its dp rank. Local.

    Raises:
        DeclarationError: it does not say which of its numbers is the dp rank.
    """
    is_one_rank = groups_of(param, groups).tp.size == 1 and groups.pp.size == 1
    if isinstance(entity.replica_id, int) and not is_one_rank:
        raise DeclarationError(
            f"{entity.key!r}: replica_id {entity.replica_id} is a single number, which does not say "
            f"whether it counts tp, pp or dp ranks. Give the tuple (pipeline copy, tp rank if not "
            f"sharded over tp, dp rank).",
            key=entity.key,
            rank=groups.rank,
        )
    return replica_of(entity)[:2]
