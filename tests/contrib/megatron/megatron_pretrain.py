"""Megatron-LM's own pretrain_gpt.py on CPU ranks: one rank of a run.

    python tests/contrib/megatron/megatron_pretrain.py [--megackpt] CHECKOUT/pretrain_gpt.py ARGUMENTS...

is one rank, as torch.distributed.run starts it. Its training loop, arguments and checkpointing module are
Megatron-LM's, unchanged; with `--megackpt` its dist_checkpointing is megackpt (`install()`). torch
answers for a GPU as `megatron_stand_ins` says, and here also for what a training loop asks of one:
streams, events, memory counters, a random generator, process groups of NCCL (gloo's). Nothing is
compiled: the helpers of its data sets have to be there, built, as they are in its wheels.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import runpy
import sys
from types import SimpleNamespace
from typing import Any


def answer_for_a_gpu() -> None:
    """Let torch.cuda give what a training loop asks for. After Megatron-Core was imported."""
    import torch

    cuda: Any = torch.cuda
    properties = SimpleNamespace(multi_processor_count=1, total_memory=1, major=8, minor=0, name="cpu")
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: properties
    cuda.memory_stats = lambda *_: collections.defaultdict(int)
    cuda.empty_cache = lambda: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Stream, cuda.Event = _Stream, _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda _: contextlib.nullcontext()
    torch.accelerator.is_available = lambda: False  # loaders of data pin no memory
    dist: Any = torch.distributed
    for name in ("init_process_group", "new_group", "barrier"):
        setattr(dist, name, _by_gloo(getattr(dist, name)))


class _Stream:
    """A stream or an event: everything is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: 0.0


def _by_gloo(call: Any) -> Any:
    """Return a function of torch.distributed without what it is told about NCCL and devices."""

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pg_options", "device_id", "device_ids")}
        if "backend" in kwargs:
            kwargs["backend"] = "gloo"
        return call(*args, **kwargs)

    return called


def prepare(arguments: list[str]) -> list[str]:
    """Import Megatron-LM, over megackpt where asked for; return the script and its arguments."""
    if arguments[0] == "--megackpt":
        from megackpt.contrib import megatron

        megatron.install()
        arguments = arguments[1:]
    from tests.contrib.megatron.megatron_stand_ins import pretend

    importlib.import_module("megatron.core")  # looks for a GPU, and may find that there is none
    importlib.import_module("megatron.training")
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    with contextlib.suppress(ModuleNotFoundError):  # gone from 0.17 on
        importlib.import_module("megatron.legacy.fused_kernels").load = lambda _: None
    answer_for_a_gpu()
    pretend()
    return arguments


def run(arguments: list[str]) -> None:
    """Run a script with its arguments."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(prepare(sys.argv[1:]))
