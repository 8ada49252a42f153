"""Apex's DistributedFusedAdam: its fragments, declared as flat ranges of their parameters.

A rank has shards of fixed-size buckets; a fragment is the part of a parameter that is in one bucket. What is
declared follows from the fragments of this rank alone. Apex's own state dict gathers the whole float32 state
on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megackpt.entities import ShardedBase, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.remainders import join_master, split_master
from megackpt.training.optim.sharded_state import ParamEntity, find_param_entities, replica_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_distributed_fused_adam(optimizer: Any) -> bool:
    """Return whether this is Apex's DistributedFusedAdam, by name and attributes. Local."""
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    return "DistributedFusedAdam" in names and hasattr(optimizer, "init_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What this rank has of one parameter in one bucket.

    Attributes:
        position: of the parameter among all of the optimizer's.
        number: of the fragment among those of the parameter.
        param: the parameter.
        flat_range: the elements of the flattened parameter.
        shard_range: the same elements in the bucket's shard.
        bucket: Apex's `StateBucket`.
        scales: tensors by which stored values are multiplied, by `param`, `exp_avg` and `exp_avg_sq`; empty
            without scaled states.
    """

    position: int
    number: int
    param: Parameter
    flat_range: slice
    shard_range: slice
    bucket: Any
    scales: Mapping[str, Tensor]

    @property
    def weight(self) -> Tensor:
        """The elements of the parameter, a view."""
        return self.param.detach().view(-1)[self.flat_range]

    def value(self, name: str) -> Tensor:
        """Return a moment or the master as float32: a view of the shard where it is that, else a copy."""
        if name == MASTER and self.bucket.params_shard is None:
            return join_master(self.weight, self.bucket.param_remainders_shard[self.shard_range])
        stored = self._shard(name)[self.shard_range]
        return stored.float() * self.scales[_scale_name(name)] if self.scales else stored.float()

    def restore(self, optimizer: Any, name: str, loaded: Tensor) -> None:
        """Write a loaded moment or master."""
        if name == MASTER and self.bucket.params_shard is None:
            split_master(
                loaded, weight=self.weight, remainder=self.bucket.param_remainders_shard[self.shard_range]
            )
            return
        stored = self._shard(name)[self.shard_range]
        if self.scales:
            loaded = loaded.clone()
            optimizer._apply_state_scale(loaded, self.scales[_scale_name(name)])
        if loaded.data_ptr() != stored.data_ptr():
            stored.copy_(loaded)

    def names(self) -> tuple[str, ...]:
        """Return the names of what is stored."""
        has_master = self.bucket.params_shard is not None or self.bucket.param_remainders_shard is not None
        return (MASTER, *_MOMENTS) if has_master else _MOMENTS

    def _shard(self, name: str) -> Tensor:
        shard: Tensor = self.bucket.params_shard if name == MASTER else getattr(self.bucket, f"{name}_shard")
        return shard


def declare_fragments(
    optimizer: Any, model_sharded_state_dict: ShardedStateDict
) -> dict[int, dict[str, ShardedBase]]:
    """Declare this rank's fragments by position of the parameter, and name and number of the fragment.

    Local, if no gradients or parameters are left to synchronise; otherwise Apex synchronises them first
    (collective over its process groups).

    Raises:
        DeclarationError: a parameter is not declared, or is not contiguous in its dims' order.
    """
    optimizer.init_params()
    optimizer.grad_sync()
    optimizer.param_sync()
    fragments = list(_fragments(optimizer))
    params = {fragment.position: fragment.param for fragment in fragments}  # some have several fragments
    entities = find_param_entities(model_sharded_state_dict, list(params.values()))
    entity_of = dict(zip(params, entities, strict=True))
    declared: dict[int, dict[str, ShardedBase]] = {}
    for fragment in fragments:
        of_param = declared.setdefault(fragment.position, {})
        of_param.update(_declare_fragment(fragment, entity_of[fragment.position], _redundant_rank(optimizer)))
    return declared


def _declare_fragment(
    fragment: Fragment, entity: ParamEntity, redundant_rank: int
) -> Iterator[tuple[str, ShardedBase]]:
    """Yield the declaration of each state of a fragment, by name and number of the fragment."""
    # Ranks of one distributed group have different ranges, and those of a redundant group have copies.
    replica = (*replica_of(entity)[:2], redundant_rank)
    for name in fragment.names():
        yield (
            f"{name}.{fragment.number}",
            entity.retarget(
                key=f"optimizer.state.{name}.{entity.key}",
                data=fragment.value(name),
                replica_id=replica,
                flattened_range=fragment.flat_range,
            ),
        )


@torch.no_grad()
def restore_fragments(optimizer: Any, loaded: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Write what was loaded into the fragments. Local; after the model was loaded."""
    for fragment in _fragments(optimizer):
        of_param = loaded.get(fragment.position, {})
        for name in fragment.names():
            value = of_param.get(f"{name}.{fragment.number}")
            if value is not None:
                fragment.restore(optimizer, name, value)


def _fragments(optimizer: Any) -> Iterator[Fragment]:
    """Yield the fragments that this rank has elements of."""
    params = [
        (group_id, param_id, param)
        for group_id, group in enumerate(optimizer.param_groups)
        for param_id, param in enumerate(group["params"])
    ]
    for position, (group_id, param_id, param) in enumerate(params):
        if not param.is_contiguous():
            raise DeclarationError(
                f"parameter {position} of shape {tuple(param.shape)} is not contiguous (channels_last?), and "
                f"Apex flattens it in another order than that of its dims. Make it contiguous before the "
                f"optimizer is made."
            )
        for number, fragment in enumerate(optimizer.state[param]["fragments"]):
            if fragment.in_local_shard:
                yield Fragment(
                    position=position,
                    number=number,
                    param=param,
                    flat_range=slice(*fragment.shard_param_range),
                    shard_range=slice(*fragment.shard_range),
                    bucket=optimizer.state["buckets"][fragment.bucket_id],
                    scales=_scales(optimizer, (group_id, param_id, fragment.bucket_id)),
                )


def _scales(optimizer: Any, key: tuple[int, int, int]) -> Mapping[str, Tensor]:
    scales: Mapping[str, Tensor] = optimizer._state_scales[key] if optimizer.with_scaled_states else {}
    return scales


def _scale_name(name: str) -> str:
    return "param" if name == MASTER else name


def _redundant_rank(optimizer: Any) -> int:
    if optimizer.redundant_size == 1:
        return 0
    return dist.get_rank(optimizer.redundant_process_group)
