"""Optimizers with the attributes and the life cycle of NVIDIA's Apex, computed by torch on CPU.

What matters here is kept as Apex has it: where each state, master and step is, when it is made, what
`state_dict()` has and what `load_state_dict` does to it, and the layout of buckets and fragments. Arithmetic
is plain. Below them: how they train on small parameters, are declared, saved and loaded.
Source: Apex `optimizers/*.py` and `contrib/optimizers/distributed_fused_adam.py` (2026-07).
"""

from __future__ import annotations

import io
import math
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import ShardedTensor, load, save
from megackpt.contrib.apex import load_sharded_state_dict, sharded_state_dict
from megackpt.entities import ShardedStateDict
from megackpt.training.optim import join_master, split_master
from megackpt.training.parallel import ParallelGroups, ParallelLayout

ADAM = {"bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LAMB = {"betas": (0.9, 0.99), "eps": 1e-6}


def _moments(state: dict[str, Any], param: Parameter, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the moments of a parameter, which its first step makes."""
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(param.data, dtype=dtype)
    return state["exp_avg"], state["exp_avg_sq"]


def _masters(group: dict[str, Any], *dtypes: torch.dtype) -> dict[str, Any]:
    """Return masters of the parameters that have one of these dtypes, and None for others."""
    return {"params": [p.clone().detach().float() if p.dtype in dtypes else None for p in group["params"]]}


def _adam_update(grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    return (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + group["eps"])


class FusedAdam(torch.optim.Optimizer):
    """Moments are always float32; masters are made with the optimizer, in an attribute of their own."""

    def __init__(
        self, params: Any, lr: float = 1e-2, *, capturable: bool = False, master_weights: bool = False
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        rate = torch.tensor(lr, dtype=torch.float32) if capturable else lr
        super().__init__(params, {"lr": rate, **ADAM})
        self.capturable, self.master_weights = capturable, master_weights
        of_dtypes = (torch.float32, torch.float16, torch.bfloat16) if master_weights else ()
        self.param_groups_master = [_masters(group, *of_dtypes) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, group_master in zip(self.param_groups, self.param_groups_master, strict=True):
            group.setdefault("step", torch.tensor([0], dtype=torch.int) if self.capturable else 0)
            group["step"] += 1
            for p, master in zip(group["params"], group_master["params"], strict=True):
                if p.grad is None:
                    continue
                m, v = _moments(self.state[p], p, torch.float32)
                update = _adam_update(p.grad.float(), m, v, int(group["step"]), group)
                # The kernel of bf16 weights gets no masters (apex #1728).
                uses_master = master is not None and p.dtype != torch.bfloat16
                weight = master if uses_master else p.float()
                weight.sub_(float(group["lr"]) * (update + group["weight_decay"] * weight))
                p.copy_(weight)


class FusedSGD(torch.optim.Optimizer):
    """All buffers of a group are made in the first step, which uses the gradient as it is."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, dampening: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first_run = True
            for p in group["params"]:
                if "momentum_buffer" not in self.state[p]:
                    first_run = True
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.data)
                else:
                    first_run = False
            for p in group["params"]:
                buffer = self.state[p]["momentum_buffer"]
                share = 1.0 if first_run else 1 - group["dampening"]
                buffer.mul_(group["momentum"]).add_(p.grad, alpha=share)
                p.sub_(group["lr"] * buffer)


class FusedAdagrad(torch.optim.Optimizer):
    """Sums have the dtype of the parameter; there is no step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "eps": 1e-10, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p.data))
                grad = p.grad + group["weight_decay"] * p
                total.addcmul_(grad, grad)
                p.sub_(group["lr"] * grad / (total.sqrt() + group["eps"]))


class FusedLAMB(torch.optim.Optimizer):
    """Moments have the dtype of the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, **LAMB, "max_grad_norm": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                update = _adam_update(p.grad, *_moments(self.state[p], p, p.dtype), group["step"], group)
                p.sub_(group["lr"] * p.norm() / update.norm() * update)


class FusedMixedPrecisionLamb(torch.optim.Optimizer):
    """Masters are made in the first step; `lr` and `step` are always tensors."""

    def __init__(self, params: Any, lr: float = 1e-2, reduced_precision_dtype: Any = None) -> None:
        tensors = {"lr": torch.tensor(lr, dtype=torch.float32), "step": torch.tensor([0], dtype=torch.int)}
        super().__init__(params, {**tensors, **LAMB})
        for group in self.param_groups:
            group |= {name: group[name].clone() for name in tensors}
        self.reduced_precision_dtype = reduced_precision_dtype
        self.param_groups_full_precision: list[dict[str, Any]] = []

    def _setup_full_precision_params(self) -> None:
        for group in self.param_groups:
            self.param_groups_full_precision.append(_masters(group, self.reduced_precision_dtype))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if len(self.param_groups_full_precision) == 0:
            self._setup_full_precision_params()
        for group, full in zip(self.param_groups, self.param_groups_full_precision, strict=True):
            group["step"] += 1
            for p, master in zip(group["params"], full["params"], strict=True):
                weight = p if master is None else master
                grad, moments = p.grad.to(weight.dtype), _moments(self.state[p], p, weight.dtype)
                update = _adam_update(grad, *moments, int(group["step"]), group)
                weight.sub_(float(group["lr"]) * weight.norm() / update.norm() * update)
                p.copy_(weight)


class FusedNovoGrad(torch.optim.Optimizer):
    """A norm for each parameter, in two lists in the group: of the float16 and of the float32 parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.9), "eps": 1e-8})

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if len(group["params"]) > 0:
                group["exp_avg_sq"] = [norms.to(group["params"][0].device) for norms in group["exp_avg_sq"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            by_dtype = [[p for p in group["params"] if p.dtype == d] for d in (torch.float16, torch.float32)]
            for p in group["params"]:
                if len(self.state[p]) == 0:
                    self.state[p]["exp_avg"] = torch.zeros_like(p.data)
            if "exp_avg_sq" not in group:  # the first norms, so that the first blend has no effect
                group["exp_avg_sq"] = [
                    torch.tensor([float(p.grad.float().norm()) for p in members]) for members in by_dtype
                ]
            for members, norms in zip(by_dtype, group["exp_avg_sq"], strict=True):
                assert len(members) == norms.numel()
                for index, p in enumerate(members):
                    beta1, beta2 = group["betas"]
                    norms[index] = (
                        beta2 * norms[index] ** 2 + (1 - beta2) * p.grad.float().norm() ** 2
                    ).sqrt()
                    scaled = p.grad / (norms[index] + group["eps"])
                    self.state[p]["exp_avg"].mul_(beta1).add_(scaled.to(p.dtype))
                    p.sub_(group["lr"] * self.state[p]["exp_avg"])


@dataclass
class ParameterFragment:
    """Where a part of a parameter is in a bucket, and in this rank's shard of it."""

    param_group_id: int
    param_id: int
    bucket_id: int
    param_range: tuple[int, int]
    bucket_range: tuple[int, int]
    in_local_shard: bool
    shard_range: tuple[int, int] | None
    shard_bucket_range: tuple[int, int] | None
    shard_param_range: tuple[int, int] | None


class StateBucket:
    """A rank's shards of the state of one bucket."""

    def __init__(self, shard_size: int, dtype: torch.dtype, *, params: bool, remainders: bool) -> None:
        self.shard_size, self.filled_size = shard_size, 0
        self.fragments: list[ParameterFragment] = []
        self.params_shard = torch.zeros(shard_size, dtype=dtype) if params else None
        self.param_remainders_shard = torch.zeros(shard_size, dtype=torch.int16) if remainders else None
        self.exp_avg_shard = torch.zeros(shard_size, dtype=dtype)
        self.exp_avg_sq_shard = torch.zeros(shard_size, dtype=dtype)


_GATHERED = ("param", "exp_avg", "exp_avg_sq")


class DistributedFusedAdam(torch.optim.Optimizer):
    """ZeRO-2 with buckets of a fixed size; here without communication."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        *,
        rank: int = 0,
        size: int = 1,
        dtype: torch.dtype = torch.float32,
        store_params: bool = True,
        store_param_remainders: bool = False,
        with_scaled_states: bool = False,
        default_shard_size: int = 48,
    ) -> None:
        super().__init__(params, {"lr": lr, **ADAM})
        self.distributed_rank, self.distributed_size, self.redundant_size = rank, size, 1
        self.dtype, self.alignment, self.default_shard_size = dtype, 16, default_shard_size
        self.store_params, self.store_param_remainders = store_params, store_param_remainders
        self.with_scaled_states = with_scaled_states
        self._state_scales: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self.state["step"], self.state["buckets"] = 0, []  # type: ignore[index, assignment]
        self.syncs: list[str] = []

    def parameters(self) -> Iterator[Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    def init_params(self, params: Iterable[Parameter] | None = None) -> None:
        for group_id, group in enumerate(self.param_groups):
            for param_id, param in enumerate(group["params"]):
                if "fragments" not in self.state[param]:
                    self._init_param_state(param, group_id, param_id)

    def grad_sync(self) -> None:
        self.syncs.append("gradients")

    def param_sync(self) -> None:
        self.syncs.append("parameters")

    def _init_param_state(self, param: Parameter, group_id: int, param_id: int) -> None:
        self.state[param]["fragments"] = []
        buckets: list[StateBucket] = self.state["buckets"]  # type: ignore[index, assignment]
        bucket_size, start = self.default_shard_size * self.distributed_size, 0
        while start < param.numel():
            if not buckets or _round_up(buckets[-1].filled_size, self.alignment) >= bucket_size:
                kept = {"params": self.store_params, "remainders": self.store_param_remainders}
                buckets.append(StateBucket(self.default_shard_size, self.dtype, **kept))
            at = _round_up(buckets[-1].filled_size, self.alignment)
            size = min(param.numel() - start, bucket_size - at)
            fragment = self._fragment(group_id, param_id, len(buckets) - 1, start, at, size)
            self.state[param]["fragments"].append(fragment)
            buckets[-1].fragments.append(fragment)
            buckets[-1].filled_size = at + size
            start += size
            if fragment.in_local_shard:
                self._init_fragment(param, fragment, buckets[-1])

    def _init_fragment(self, param: Parameter, fragment: ParameterFragment, bucket: StateBucket) -> None:
        assert fragment.shard_param_range is not None
        assert fragment.shard_range is not None
        key = (fragment.param_group_id, fragment.param_id, fragment.bucket_id)
        if self.with_scaled_states:
            self._state_scales[key] = {name: torch.zeros(1) for name in _GATHERED}
        if bucket.params_shard is not None:
            weight = param.detach().view(-1)[slice(*fragment.shard_param_range)].float()
            if self.with_scaled_states:
                self._apply_state_scale(weight, self._state_scales[key]["param"])
            bucket.params_shard[slice(*fragment.shard_range)].copy_(weight)

    def _fragment(
        self, group_id: int, param_id: int, bucket_id: int, start: int, at: int, size: int
    ) -> ParameterFragment:
        shard_size, rank = self.default_shard_size, self.distributed_rank
        first = min(max(at - shard_size * rank, 0), shard_size)
        last = min(max(at + size - shard_size * rank, 0), shard_size)
        is_local = first < last
        bucket_first = first + shard_size * rank
        param_first = bucket_first - at + start
        return ParameterFragment(
            param_group_id=group_id,
            param_id=param_id,
            bucket_id=bucket_id,
            param_range=(start, start + size),
            bucket_range=(at, at + size),
            in_local_shard=is_local,
            shard_range=(first, last) if is_local else None,
            shard_bucket_range=(bucket_first, bucket_first + last - first) if is_local else None,
            shard_param_range=(param_first, param_first + last - first) if is_local else None,
        )

    def _apply_state_scale(self, tensor: Tensor, scale: Tensor) -> None:
        scale.copy_(tensor.abs().max().float() / (torch.finfo(self.dtype).max / 2))
        tensor.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))

    def state_dict(self) -> dict[str, Any]:
        """Format 2, of one rank: whole tensors of every parameter, masters rebuilt from remainders."""
        assert self.distributed_size == 1
        stored = super().state_dict()
        stored["state"] = {"step": self.state["step"]}  # type: ignore[index]
        buckets: list[StateBucket] = self.state["buckets"]  # type: ignore[index, assignment]
        for index, param in enumerate(self.parameters()):
            whole = {name: torch.zeros_like(param.detach(), dtype=self.dtype) for name in _GATHERED}
            for fragment in self.state[param]["fragments"]:
                bucket, at = buckets[fragment.bucket_id], slice(*fragment.shard_range)
                part = slice(*fragment.shard_param_range)
                whole["exp_avg"].view(-1)[part] = bucket.exp_avg_shard[at]
                whole["exp_avg_sq"].view(-1)[part] = bucket.exp_avg_sq_shard[at]
                master = param.detach().view(-1)[part]
                if bucket.param_remainders_shard is not None:
                    master = join_master(master, bucket.param_remainders_shard[at])
                elif bucket.params_shard is not None:
                    master = bucket.params_shard[at]
                whole["param"].view(-1)[part] = master
            stored["state"][index] = whole
        return {**stored, "format": 2}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.init_params()
        self.state["step"] += 1  # type: ignore[index, operator]
        for group_id, group in enumerate(self.param_groups):
            for param_id, param in enumerate(group["params"]):
                for fragment in self.state[param]["fragments"]:
                    if fragment.in_local_shard:
                        key = (group_id, param_id, fragment.bucket_id)
                        self._step_fragment(param, fragment, group, self._state_scales.get(key, {}))

    def _step_fragment(
        self, param: Parameter, fragment: Any, group: dict[str, Any], scales: dict[str, Tensor]
    ) -> None:
        bucket: StateBucket = self.state["buckets"][fragment.bucket_id]  # type: ignore[index, call-overload]
        at, part = slice(*fragment.shard_range), slice(*fragment.shard_param_range)
        weight = param.detach().view(-1)[part]
        stored = {"exp_avg": bucket.exp_avg_shard[at], "exp_avg_sq": bucket.exp_avg_sq_shard[at]}
        if bucket.params_shard is not None:
            stored["param"] = bucket.params_shard[at]
        values = [s.float() * scales[n] if scales else s.float() for n, s in stored.items()]
        if bucket.param_remainders_shard is not None:
            values.append(join_master(weight, bucket.param_remainders_shard[at]))
        m, v = values[:2]
        master = values[2] if len(values) > 2 else weight.float()
        assert param.grad is not None
        grad = param.grad.view(-1)[part].float()
        update = _adam_update(grad, m, v, int(self.state["step"]), group)  # type: ignore[index, call-overload]
        master.sub_(group["lr"] * (update + group["weight_decay"] * master))
        for (name, tensor), value in zip(stored.items(), values, strict=False):
            kept = value.clone()
            if scales:
                self._apply_state_scale(kept, scales[name])
            tensor.copy_(kept)
        if bucket.param_remainders_shard is not None:
            split_master(master, weight=weight, remainder=bucket.param_remainders_shard[at])
        else:
            weight.copy_(master)


def state_dict_of_format_1(optimizers: Sequence[DistributedFusedAdam]) -> dict[str, Any]:
    """Return what rank 0 gets: the bytes of every rank's state dict, with its buckets and fragments."""
    gathered = []
    for optimizer in optimizers:
        file = io.BytesIO()
        torch.save(torch.optim.Optimizer.state_dict(optimizer), file)
        gathered.append(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    return {"gathered_states": gathered, "format": 1}


@contextmanager
def names_of_apex() -> Iterator[None]:
    """Give the classes of buckets and fragments the names by which Apex's are pickled."""
    name, inner = "apex.contrib.optimizers.distributed_fused_adam", (StateBucket, ParameterFragment)
    outer = type("DistributedFusedAdam", (), {"__module__": name, **{c.__name__: c for c in inner}})
    module: Any = types.ModuleType(name)
    module.DistributedFusedAdam = outer
    parents = [types.ModuleType(name.rsplit(".", n)[0]) for n in (1, 2, 3)]
    own = [(cls, cls.__module__, cls.__qualname__) for cls in inner]
    with mock.patch.dict("sys.modules", {m.__name__: m for m in (*parents, module)}):
        try:
            for cls in inner:
                cls.__module__, cls.__qualname__ = name, f"{outer.__name__}.{cls.__name__}"
            yield
        finally:
            for cls, own_module, own_qualname in own:
                cls.__module__, cls.__qualname__ = own_module, own_qualname


@torch.no_grad()
def share_params(optimizers: Sequence[DistributedFusedAdam]) -> None:
    """Give every rank the parameters of all others' shards, as the gather after a step does."""
    for source in optimizers:
        for position, param in enumerate(source.parameters()):
            for fragment in source.state[param]["fragments"]:
                if fragment.in_local_shard:
                    part = slice(*fragment.shard_param_range)
                    for target in optimizers:
                        copy = list(target.parameters())[position]
                        copy.detach().view(-1)[part].copy_(param.detach().view(-1)[part])


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple


SHAPES = [(4, 6), (13,), (9, 10)]


def make_params(seed: int, dtype: torch.dtype) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def groups_of(params: list[Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def train(params: list[Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def set_grads(params: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def declare(params: list[Parameter], dp: int = 0) -> ShardedStateDict:
    return {
        str(i): ShardedTensor.from_rank_offsets(f"p{i}", p, replica_id=(0, 0, dp))
        for i, p in enumerate(params)
    }


def are_equal(a: list[Parameter], b: list[Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def resume(
    params: list[Parameter], optimizer: Optimizer, path: Path, fresh: list[Parameter], into: Optimizer
) -> None:
    """Save one, and load it into the other."""
    model = declare(params)
    save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, path)
    model = declare(fresh)
    request = {"model": model, "optimizer": sharded_state_dict(into, model, is_loading=True)}
    load_sharded_state_dict(into, load(request, path)["optimizer"])


SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)

DISTRIBUTED: dict[str, dict[str, Any]] = {
    "float32 masters": {},
    "remainders": {"store_params": False, "store_param_remainders": True},
    "no masters": {"store_params": False},
    "bfloat16 states": {"dtype": torch.bfloat16},
}


def make_ranks(seed: int, size: int, name: str) -> tuple[list[list[Parameter]], list[Any]]:
    dtype = torch.float32 if name == "no masters" else torch.bfloat16
    params = [make_params(seed, dtype) for _ in range(size)]
    optimizers = [
        DistributedFusedAdam(groups_of(p), rank=rank, size=size, **DISTRIBUTED[name])
        for rank, p in enumerate(params)
    ]
    return params, optimizers


def train_ranks(params: list[list[Parameter]], optimizers: list[Any], steps: range) -> None:
    for step in steps:
        for p, optimizer in zip(params, optimizers, strict=True):
            set_grads(p, step)
            optimizer.step()
        share_params(optimizers)
