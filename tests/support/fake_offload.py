"""Optimizers that offload to the host, on a machine without another device.

HybridDeviceOptimizer is Megatron-Core's own class, on tensors that say that they are on a CUDA device.
CPUOffload has the attributes of torchao's CPUOffloadOptimizer, which needs a device to be made.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter


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
