"""Megatron-Core as a peer on a machine without CUDA.

    python tests/benchmarks/bench_peers.py --dir DIR --vs tests.benchmarks.mcore_on_cpu:MegatronCoreOnCpu

While Megatron-Core's code runs, torch takes the device "cuda" for the CPU. That code is as it was installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.benchmarks.peers.megatron import MegatronCore


class MegatronCoreOnCpu(MegatronCore):
    """Megatron-Core with the CPU in place of a CUDA device."""

    needs_cuda = False

    def save(self, declared: Any, directory: Path) -> None:
        with cuda_is_the_cpu():
            super().save(declared, directory)

    def load(self, declared: Any, directory: Path) -> None:
        with cuda_is_the_cpu():
            super().load(declared, directory)

    def save_async(self, declared: Any, directory: Path) -> Callable[[], Path]:
        with cuda_is_the_cpu():
            finish = super().save_async(declared, directory)

        def wait() -> Path:
            with cuda_is_the_cpu():
                return finish()

        return wait


class _HostMemory(TorchFunctionMode):
    """While it is entered, torch functions take the device "cuda" for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if str(a).startswith("cuda") else a for a in args)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cuda_is_the_cpu() -> Iterator[None]:
    """Let Megatron-Core find the CPU where it looks for a CUDA device."""
    with (
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        _HostMemory(),
    ):
        yield
