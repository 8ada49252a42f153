"""Runs a script that trains with torchtitan 0.3.0 on processors, with gloo and torch 2.13.

torchrun --nproc-per-node 2 tests/contrib/torchtitan/torchtitan_on_cpu.py SCRIPT ARGUMENTS...

torchtitan trains on accelerators, and calls what only newer versions of torch have. What is replaced here is
no part of a checkpoint:

* the accelerator, by processors, of whose memory and speed torchtitan is told nothing
* `torch.distributed.set_timeout`, which only newer versions of torch have, by nothing
* gloo's missing reduction with a factor, by a sum; torchtitan's factor is 1
* kernels of attention, by the only one that torch has for processors and that does not depend on them
* the package `datasets`, if it is not installed; it reads only data that the script does not ask for
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from typing import Any

import torch
import torch._utils
import torch.distributed
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend


def replace_accelerator() -> None:
    """Replace what torchtitan finds when it is imported."""
    properties = types.SimpleNamespace(name="cpu", total_memory=1 << 30)
    processors = types.SimpleNamespace(
        set_device=torch.cpu.set_device,
        synchronize=torch.cpu.synchronize,
        device_count=torch.cpu.device_count,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: properties,
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda kind: processors


def replace_newer_torch() -> None:
    """Add what torchtitan calls and this version of torch does not have."""
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group=None: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_by_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_by_sum


def replace_datasets() -> None:
    """Stand for a package that torchtitan's own data loaders import."""
    if importlib.util.find_spec("datasets") is None:
        datasets, distributed = types.ModuleType("datasets"), types.ModuleType("datasets.distributed")
        datasets.Dataset = datasets.load_dataset = distributed.split_dataset_by_node = None
        sys.modules |= {"datasets": datasets, "datasets.distributed": distributed}


def prepare() -> None:
    """Make torchtitan importable and its Llama trainable."""
    replace_accelerator()
    replace_newer_torch()
    replace_datasets()
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.tools.logging import init_logger

    init_logger()
    ScaledDotProductAttention.sdpa_backends = [SDPBackend.MATH]


if __name__ == "__main__":
    prepare()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
