"""A small sharded model for tests of optimizers, and a slow, obvious save and load for sharded state dicts.

The model has what makes optimizer state hard: stacked layers, tp-sharded and replicated parameters, a fused
gate/up weight, a factory, and an embedding tied between the first and the last stage.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.entities import (
    ComponentPlacement,
    ReplicaId,
    ShardedLayout,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megackpt.entities.tree import iter_leaves
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel.attributes import RowRange, mark, mark_copied_rows
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.layout import ParallelLayout
from megackpt.training.parallel.rng import stable_seed

LAYERS, HIDDEN, FFN, VOCAB = 4, 12, 20, 24
HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 3  # with tp=4, two ranks hold each key head

# What a checkpoint holds of the model: key -> global shape.
SHAPES = {
    "embedding": (VOCAB, HIDDEN),
    "layers.fc1.gate": (LAYERS, FFN, HIDDEN),
    "layers.fc1.up": (LAYERS, FFN, HIDDEN),
    "layers.fc2": (LAYERS, HIDDEN, FFN),
    "layers.kq.k": (LAYERS, KEY_HEADS * HEAD_DIM, HIDDEN),
    "layers.kq.q": (LAYERS, HEADS * HEAD_DIM, HIDDEN),
    "layers.norm": (LAYERS, HIDDEN),
    "final.left": (3, HIDDEN),
    "final.right": (5, HIDDEN),
}
# Keys of whole parameters, as their numbers (`step`) are stored: key -> global shape.
PARAM_SHAPES = {
    "embedding": (),
    "layers.fc1": (LAYERS,),
    "layers.fc2": (LAYERS,),
    "layers.kq": (LAYERS,),
    "layers.norm": (LAYERS,),
    "final": (),
}

Arrays = dict[str, Tensor]


@dataclass
class WorldParam:
    """A parameter of one rank, how it is declared, and how to cut its values out of global arrays."""

    param: Parameter
    entity: Any  # ShardedTensor, ShardedLayout or ShardedTensorFactory
    cut: Callable[[Arrays], Tensor]
    cut_number: Callable[[Arrays], Tensor]


def random_arrays(shapes: dict[str, tuple[int, ...]], seed: int) -> Arrays:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def random_of_key(*shape: int, key: str) -> Tensor:
    """Return an array that depends on its key alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(stable_seed(7, key)))


def make_model(groups: ParallelGroups, weights: Arrays, dtype: torch.dtype) -> list[WorldParam]:
    """Build this rank's parameters out of the global weights; layers are split over stages."""
    tp, pp, dp = groups.tp, groups.pp, groups.dp
    params: list[WorldParam] = []

    def rows(array: Tensor, dim: int) -> Tensor:
        return array.chunk(tp.size, dim)[tp.rank]

    def add(cut: Callable[[Arrays], Tensor], number: Callable[[Arrays], Tensor], *flags: Any) -> Parameter:
        param = Parameter(cut(weights).to(dtype))
        mark(param, *flags)
        params.append(WorldParam(param, None, cut, number))
        return param

    def replica(*, pp_copy: int = 0, tp_sharded: bool) -> tuple[int, int, int]:
        return (pp_copy, 0 if tp_sharded else tp.rank, dp.rank)

    if pp.is_first or pp.is_last:
        flags = ["tensor_model_parallel", "shared_embedding"] + ["is_duplicate"] * (not pp.is_first)
        w = add(lambda a: rows(a["embedding"], 0), lambda n: n["embedding"], *flags)
        rid = replica(pp_copy=int(not pp.is_first), tp_sharded=True)
        params[-1].entity = ShardedTensor.from_rank_offsets(
            "embedding", w, (0, tp.rank, tp.size), replica_id=rid
        )
    for layer in range(pp.rank * LAYERS // pp.size, (pp.rank + 1) * LAYERS // pp.size):
        _add_layer(add, params, rows, replica, groups, layer)
    if pp.is_last:
        w = add(lambda a: torch.cat([a["final.left"], a["final.right"]]), lambda n: n["final"])
        params[-1].entity = split_factory("final", w, replica(tp_sharded=False))
    return params


def _add_layer(
    add: Any, params: list[WorldParam], rows: Any, replica: Any, groups: ParallelGroups, layer: int
) -> None:
    tp = groups.tp
    stacked: Any = {"prepend_axis_num": 1}
    number = (0, layer, LAYERS)

    w = add(
        lambda a: torch.cat([rows(a["layers.fc1.gate"][layer], 0), rows(a["layers.fc1.up"][layer], 0)]),
        lambda n: n["layers.fc1"][layer],
        "tensor_model_parallel",
    )
    sizes = {"gate": FFN // tp.size, "up": FFN // tp.size}
    params[-1].entity = ShardedLayout.split(
        "layers.fc1",
        w,
        0,
        sizes,
        number,
        (1, tp.rank, tp.size),
        replica_id=replica(tp_sharded=True),
        **stacked,
    )
    w = add(
        lambda a: rows(a["layers.fc2"][layer], 1).contiguous(),
        lambda n: n["layers.fc2"][layer],
        "tensor_model_parallel",
    )
    params[-1].entity = ShardedTensor.from_rank_offsets(
        "layers.fc2", w, number, (2, tp.rank, tp.size), replica_id=replica(tp_sharded=True), **stacked
    )
    _add_keys_and_queries(add, params, rows, replica, tp, layer)
    w = add(lambda a: a["layers.norm"][layer], lambda n: n["layers.norm"][layer], "sequence_parallel")
    params[-1].entity = ShardedTensor.from_rank_offsets(
        "layers.norm", w, number, replica_id=replica(tp_sharded=False), **stacked
    )


def _add_keys_and_queries(
    add: Any, params: list[WorldParam], rows: Any, replica: Any, tp: Axis, layer: int
) -> None:
    """Add a fused weight whose first part several ranks hold where tp has more of them than key heads."""
    slices = min(tp.size, KEY_HEADS)
    copies = tp.size // slices
    w = add(
        lambda a: torch.cat(
            [a["layers.kq.k"][layer].chunk(slices)[tp.rank // copies], rows(a["layers.kq.q"][layer], 0)]
        ),
        lambda n: n["layers.kq"][layer],
        "tensor_model_parallel",
    )
    keys = KEY_HEADS * HEAD_DIM // slices
    if tp.rank % copies:
        mark_copied_rows(w, [RowRange(0, 0, keys)])
    number = (0, layer, LAYERS)
    of_keys = ((1, tp.rank // copies, slices), number)
    params[-1].entity = ShardedLayout.split(
        "layers.kq",
        w,
        0,
        {"k": keys, "q": HEADS * HEAD_DIM // tp.size},
        (1, tp.rank, tp.size),
        number,
        replica_id=replica(tp_sharded=True),
        prepend_axis_num=1,
        placements={"k": ComponentPlacement(of_keys, replica_id=(0, tp.rank % copies, 0))},
    )


def split_factory(key: str, data: Tensor, replica_id: ReplicaId) -> ShardedTensorFactory:
    """Store an `[8, HIDDEN]` tensor as its upper 3 and its lower 5 rows."""

    def build(key: str, data: Tensor, replica_id: ReplicaId, flat: slice | None) -> list[ShardedTensor]:
        layout = ShardedLayout.split(key, torch.empty(8, HIDDEN), 0, {"left": 3, "right": 5})
        return layout.retarget(key=key, data=data, replica_id=replica_id, flattened_range=flat).tensors()

    return ShardedTensorFactory(key, data, build, torch.cat, replica_id)


def model_state(params: Iterable[WorldParam]) -> ShardedStateDict:
    return {"model": [p.entity for p in params]}


def tensors_of(sharded_state_dict: Any) -> list[ShardedTensor]:
    """Return every ShardedTensor that the state dict stands for."""
    results: list[ShardedTensor] = []
    for _, leaf in iter_leaves({"": sharded_state_dict}):
        if isinstance(leaf, ShardedTensorFactory):
            results += tensors_of(leaf.build())
        elif isinstance(leaf, ShardedLayout):
            results += leaf.tensors()
        elif isinstance(leaf, ShardedTensor):
            results.append(leaf)
    return results


def gather(world: Iterable[ShardedStateDict]) -> Arrays:
    """Assemble the global arrays from all ranks; every element must have exactly one main replica."""
    arrays: Arrays = {}
    writers: Arrays = {}
    for tensor in (t for state_dict in world for t in tensors_of(state_dict)):
        array = arrays.setdefault(tensor.key, torch.zeros(tensor.global_shape, dtype=tensor.dtype))
        count = writers.setdefault(tensor.key, torch.zeros(tensor.global_shape, dtype=torch.int32))
        assert tuple(array.shape) == tensor.global_shape, tensor.key
        assert array.dtype == tensor.dtype, tensor.key
        if is_main_replica(tensor.replica_id):
            index = elements_of(tensor)
            array.view(-1)[index] = _data(tensor).reshape(-1)
            count.view(-1)[index] += 1
    for key, count in writers.items():
        assert bool((count == 1).all()), f"{key}: written {sorted(set(count.ravel().tolist()))} times"
    return arrays


def scatter(sharded_state_dict: ShardedStateDict, arrays: Arrays) -> None:
    """Fill every tensor of one rank in place."""
    for tensor in tensors_of(sharded_state_dict):
        data = _data(tensor)
        assert tuple(arrays[tensor.key].shape) == tensor.global_shape, tensor.key
        data.copy_(arrays[tensor.key].reshape(-1)[elements_of(tensor)].view(data.shape))


def loaded(sharded_state_dict: Any) -> Any:
    """Put its filled data in the place of every entity, as a load returns it."""
    if isinstance(sharded_state_dict, dict):
        return {key: loaded(value) for key, value in sharded_state_dict.items()}
    return getattr(sharded_state_dict, "data", sharded_state_dict)


def elements_of(tensor: ShardedTensor) -> Tensor:
    """Return the places of the tensor's elements in the flattened global array, in order."""
    everything = torch.arange(math.prod(tensor.global_shape)).view(tensor.global_shape)
    box = tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, tensor.box_shape, strict=True))
    block = everything[box].reshape(-1)
    return block if tensor.flattened_range is None else block[tensor.flattened_range]


def _data(tensor: ShardedTensor) -> Tensor:
    assert tensor.data is not None
    return tensor.data.detach()


class DeviceTensor(Tensor):
    """A tensor in host memory that says that it is on a CUDA device, as do its copies, but not `cpu()`."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def detach(self) -> Tensor:
        return Tensor.detach(self).as_subclass(DeviceTensor)  # of parameters it is a plain tensor

    def cpu(self, *args: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def hybrid(params: list[Any], **options: Any) -> Any:
    """Return Megatron-Core's HybridDeviceOptimizer, with part of the parameters on the host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.optimizer.cpu_offloading.hybrid_optimizer")
    for param in [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]:
        param.__class__ = type("DeviceParameter", (DeviceTensor, Parameter), {})
    settings = {
        "offload_fraction": 0.2,
        "cpu_optimizer_cls": torch.optim.AdamW,
        "gpu_optimizer_cls": torch.optim.AdamW,
        "param_update_in_fp32": True,
        "pin_cpu_grads": False,
        "lr": 0.01,
    }
    patches = mock.patch.multiple(
        torch.cuda,
        Stream=mock.MagicMock(),
        current_stream=mock.MagicMock(),
        stream=lambda stream: nullcontext(),
    )

    class Hybrid(module.HybridDeviceOptimizer):  # type: ignore[misc,name-defined]
        def step(self, closure: Any = None) -> None:
            with patches:
                super().step(closure)

    with patches, mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor):
        return Hybrid(params, **{**settings, **options})


class CPUOffload:
    """Copies of large parameters on the host, each with an optimizer of its own; small ones stay."""

    def __init__(self, params: list[Parameter], lr: float = 0.01, minimal_size: int = 100) -> None:
        small = [p for p in params if p.numel() < minimal_size]
        large = [p for p in params if p.numel() >= minimal_size]
        self.param_d2h_map = {p: p.detach().clone() for p in large}
        self.optim_dict = {p: torch.optim.AdamW([{"params": self.param_d2h_map[p]}], lr=lr) for p in large}
        self.d_opt = torch.optim.AdamW([{"params": small}], lr=lr) if small else None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        inner = [*self.optim_dict.values(), *([self.d_opt] if self.d_opt else [])]
        return [group for optimizer in inner for group in optimizer.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        if self.d_opt is not None:
            self.d_opt.step()
        for param, optimizer in self.optim_dict.items():
            self.param_d2h_map[param].grad = param.grad
            optimizer.step()
            param.copy_(self.param_d2h_map[param])


Kind = type[MasterOptimizer]
KINDS = [DistributedOptimizer, MixedPrecisionOptimizer]
SINGLE_PROCESS = ParallelGroups.offline(ParallelLayout(), 0)


class PlainOptimizer(Optimizer):
    """Moves each parameter with a gradient by what `update` returns, times the learning rate."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.update(p, p.grad, self.state[p]))

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(PlainOptimizer):
    """A user's optimizer: elementwise, with a count of its steps that is a plain int."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["steps"], state["momentum"] = 0, grad.clone()
        state["steps"] += 1
        update = torch.sign(state["momentum"] * 0.9 + grad * 0.1)
        state["momentum"].lerp_(grad, 1.0 / (1 + state["steps"]))
        return update


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda g: torch.optim.Adam(g, lr=0.01),
    "adam_amsgrad_decay": lambda g: torch.optim.Adam(g, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adam_no_eps": lambda g: torch.optim.Adam(g, lr=0.01, eps=0.0),
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.01),
    "adamw_tensor_lr": lambda g: torch.optim.AdamW(g, lr=torch.tensor(0.01), foreach=False),
    "sgd": lambda g: torch.optim.SGD(g, lr=0.1),
    "sgd_momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "adagrad": lambda g: torch.optim.Adagrad(g, lr=0.1, initial_accumulator_value=0.3, lr_decay=0.1),
    "rmsprop": lambda g: torch.optim.RMSprop(g, lr=0.01, centered=True, momentum=0.9),
    "nadam": lambda g: torch.optim.NAdam(g, lr=0.01, weight_decay=0.1),
    "radam": lambda g: torch.optim.RAdam(g, lr=0.01),
    "adamax": lambda g: torch.optim.Adamax(g, lr=0.01),
    "adadelta": lambda g: torch.optim.Adadelta(g, lr=0.5),
    "asgd": lambda g: torch.optim.ASGD(g, lr=0.1, t0=1),
    "rprop": lambda g: torch.optim.Rprop(g, lr=0.01),
    "lion": lambda g: Lion(g, lr=0.01),
}


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 6, generator=generator).to(dtype)
    (model(x) * model.scale).square().sum().backward()


def train(model: nn.Module, optimizer: Any, steps: Iterator[int] | range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def declare(model: nn.Module) -> ShardedStateDict:
    return {
        key: ShardedTensor.from_rank_offsets(key, p) for key, p in model.state_dict(keep_vars=True).items()
    }
