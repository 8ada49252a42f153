"""What stands for a GPU when Megatron-Core runs on CPU ranks; imported inside a peer's own environment.

Nothing of Megatron-Core's checkpoint code is replaced. torch, not Megatron-Core, is told that the device
"cuda" is the CPU:

* a tensor made on, or moved to, "cuda" stays on the CPU (loss scales, flags, buffers of the distributed
  optimizer);
* `Tensor.type()`, which its optimizers compare with "torch.cuda.FloatTensor" and the like, gives those names;
* `torch.cuda.current_device`, `synchronize` and the current stream exist.

`FusedAdam` stands for Apex's optimizer of that name, which needs a GPU and is what Megatron-Core is used
with: it keeps `step` in its groups, not in each parameter's state. With torch's AdamW in its place neither
0.12 nor 0.16.1 can store all formats of its distributed optimizer, or load what it stored (KeyError: 'step').

And Megatron-Core 0.12 calls a private function of torch, `_write_item`, that from torch 2.7 on wants to be
told how to serialize; it is told what 0.13 and later tell it.

`EmptyModules` stand for packages that code imports and does not use here. `answer` is what programs of ranks
in this folder have in common.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.overrides import TorchFunctionMode


class CudaIsTheCpu(TorchFunctionMode):
    """While it is entered, torch functions take the device "cuda" for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if str(a).startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


def answer(work: Callable[[Path], Any]) -> None:
    """Do the work of one rank, in the folder that is the first argument; rank 0 writes its answer.

    The second argument is the file of the answer.
    """
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    answers = work(folder)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


def pretend() -> None:
    """Make this process answer for a GPU, for good. Before Megatron-Core is imported."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    CudaIsTheCpu().__enter__()
    _with_fused_adam()
    write_item = filesystem._write_item
    if "serialization_format" in inspect.signature(write_item).parameters:
        as_torch_save = filesystem.SerializationFormat.TORCH_SAVE
        filesystem._write_item = partial(write_item, serialization_format=as_torch_save)


def _with_fused_adam() -> None:
    """Let Megatron-Core's optimizers find Apex's Adam, as they would on a machine that has one."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    for module in (optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    optimizer.USING_PYTORCH_OPTIMIZER = False  # from 0.13 on


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose `step` is in its groups and whose state is two moments, as that of Apex."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), **defaults: Any) -> None:
        defaults.pop("adam_w_mode", None)
        super().__init__(params, {"lr": lr, "betas": betas, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (first, second), step = group["betas"], group["step"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
                mean.lerp_(param.grad, 1 - first)
                square.mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                param.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
                scale = (square / (1 - second**step)).sqrt_().add_(group.get("eps", 1e-8))
                param.addcdiv_(mean, scale, value=-group["lr"] / (1 - first**step))


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """The base class of Megatron-Core's Muon, with the state and the step of emerging-optimizers 0.1."""

    def __init__(
        self, params: Any, lr: float, momentum_beta: float, *, scaled_orthogonalize_fn: Any, **settings: Any
    ) -> None:
        decay = settings["weight_decay"]
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": decay})
        self.scaled_orthogonalize_fn, self.use_nesterov = scaled_orthogonalize_fn, settings["use_nesterov"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step; parameters without a gradient stay as they are."""
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param.grad))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                momentum.lerp_(param.grad, 1 - group["momentum_beta"])
                ahead = param.grad.lerp(momentum, group["momentum_beta"]) if self.use_nesterov else momentum
                param.add_(self.orthogonalize(param, ahead), alpha=-group["lr"])


def stand_for_emerging_optimizers() -> None:
    """Give Megatron-Core what it imports for Muon. An update is divided by its norm, not orthogonalized."""
    names = ("emerging_optimizers", ".orthogonalized_optimizers", ".muon_utils")
    for count in range(len(names)):
        sys.modules["".join(names[: count + 1])] = _Empty("".join(names[: count + 1]))
    package: Any = sys.modules["".join(names[:2])]
    package.OrthogonalizedOptimizer = OrthogonalizedOptimizer
    package.get_muon_scale_factor = lambda *_, **__: 1.0
    utils: Any = sys.modules["".join(names)]
    utils.newton_schulz_tp = lambda grad, **_: grad / grad.norm()


class _Empty(types.ModuleType):
    """A module whose every name is an empty class, or a function that does nothing."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {}) if name[0].isupper() else lambda *_, **__: None
        setattr(self, name, value)
        return value


class EmptyModules(MetaPathFinder, Loader):
    """Finds an empty module for each of some names, and for every module below them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        wanted = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def empty_modules(*names: str) -> Iterator[None]:
    """Let packages be empty ones for a while: what imports them meanwhile keeps what it has of them."""
    finder = EmptyModules(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        empty = [name for name, module in sys.modules.items() if isinstance(module, _Empty)]
        for name in empty:
            del sys.modules[name]


def replace_packages(bare: Sequence[str], empty: Sequence[str]) -> None:
    """Make packages importable without what their `__init__` imports, and others as empty ones, for good."""
    sys.meta_path.insert(0, EmptyModules(empty))
    for name in bare:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            package = sys.modules[name] = types.ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations or ())
