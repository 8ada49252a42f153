"""Megatron-Core's distributed optimizer on two ranks: its state as ranges, and in the form that gathers.

    megatron_ranges.py FOLDER RESULTS.json

as torch.distributed.run starts it. Each case writes its answer under a name; `test_optimizer_ranges.py` says
what has to be in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.contrib.megatron.megatron_stand_ins import answer
from tests.system.interop import megatron_peer
from tests.system.interop.jobs import Job
from tests.system.interop.megatron_peer import (
    build_model,
    build_optimizer,
    declare_optimizer,
    fill_optimizer,
    parts_of,
    start,
    states_of,
    take_a_step,
)

start(["--megackpt"])  # before Megatron-Core is imported

from megatron.core import dist_checkpointing, distributed, optimizer, parallel_state  # noqa: E402
from megatron.core.optimizer import optimizer_config  # noqa: E402

import megackpt  # noqa: E402
from megackpt.contrib import megatron  # noqa: E402

# What stands for streams, and for the version of Transformer Engine, where CPU offload asks for them.
torch.cuda.Stream = torch.cuda.current_stream = mock.MagicMock()  # type: ignore[assignment,misc]
torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,misc]
optimizer_config.is_te_min_version = lambda *_: False

FORMS = {"ranges": False, "gathered": True}


class Rank:
    """One rank's model and optimizer, with the oracle's values, at a tensor-parallel size."""

    def __init__(self, tp: int, *, overlap: bool = False, offload: float | None = None) -> None:
        self.job = Job("write", "distopt", "", tp=tp, optimizer_format="fully_reshardable")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        with overlapped_gradients() if overlap else nullcontext():
            self.model = build_model(self.job)
        with nullcontext() if offload is None else offloaded(offload):
            self.optimizer = build_optimizer(self.job, self.model)
        take_a_step(self.optimizer, steps=7)
        fill_optimizer(self.optimizer, self.model.sharded_state_dict(), check=False)

    def declare(self, form: str, *, is_loading: bool = False) -> dict[str, Any]:
        megatron.install(gather_optimizer=FORMS[form])
        return declare_optimizer(self.optimizer, self.model.sharded_state_dict(), self.job, is_loading)

    def save(self, form: str, path: str, backend: str = "torch_dist") -> None:
        dist_checkpointing.save({"optimizer": self.declare(form)}, path, (backend, 1))

    def load(self, form: str, path: str) -> int:
        """Load over other values; return how many elements have those of the oracle, which is all."""
        take_a_step(self.optimizer, steps=1)
        for part in parts_of(self.optimizer):
            for _, tensors, _ in states_of(part):
                for tensor in tensors.values():
                    tensor.detach().fill_(-1)
        loaded = dist_checkpointing.load({"optimizer": self.declare(form, is_loading=True)}, path)
        self.optimizer.load_state_dict(loaded["optimizer"])
        return fill_optimizer(self.optimizer, self.model.sharded_state_dict(), check=True)

    def steps_from_states(self) -> bool:
        """Return whether the parameters of offloaded optimizers, which step next, are those of the states."""
        hybrids = [part.optimizer for part in parts_of(self.optimizer)]
        pairs = [(h.state[p]["master_param"], h.param_to_inner_param[p]) for h in hybrids for p in h.state]
        return all(torch.equal(main, inner) for main, inner in pairs)


@contextmanager
def overlapped_gradients() -> Iterator[None]:
    """Let models be built with many buckets of gradients, which Megatron-Core makes for overlap only."""
    config = distributed.DistributedDataParallelConfig

    def overlapped(**options: Any) -> Any:
        return config(**{**options, "overlap_grad_reduce": True})

    with (
        mock.patch.object(distributed, "DistributedDataParallelConfig", overlapped),
        mock.patch.multiple(megatron_peer, BUCKET_SIZE=1000, HIDDEN=40),  # so that a bucket is to be padded
    ):
        yield


@contextmanager
def offloaded(fraction: float) -> Iterator[None]:
    """Let optimizers be built with `--optimizer-cpu-offload`, for a fraction of the parameters."""
    options = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "pin_cpu_grads": False}
    options |= {"use_precision_aware_optimizer": True, "overlap_cpu_optimizer_d2h_h2d": False}
    hybrid, divide = optimizer.HybridDeviceOptimizer, "_get_sub_optimizer_param_groups"
    with (
        mock.patch.object(optimizer, "OptimizerConfig", partial(optimizer.OptimizerConfig, **options)),
        mock.patch.object(hybrid, divide, devices_seen(getattr(hybrid, divide))),
    ):
        yield


def devices_seen(divide: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in which a tensor is on a device unless it comes from `Tensor.cpu`."""
    copies = {name: getattr(torch.Tensor, name) for name in ("detach", "clone", "float", "cpu", "pin_memory")}

    def copying(name: str) -> Callable[[Any], Any]:
        def copy(tensor: Any) -> Any:
            # Memory is not pinned here, and `cpu` would return the tensor itself.
            copied = tensor if name == "pin_memory" else copies["clone" if name == "cpu" else name](tensor)
            copied.is_on_host = name == "cpu" or getattr(tensor, "is_on_host", False)
            return copied

        return copy

    def divided(*args: Any) -> Any:
        patches = {name: copying(name) for name in copies}
        patches["is_cuda"] = property(lambda tensor: not getattr(tensor, "is_on_host", False))
        with mock.patch.multiple(torch.Tensor, **patches):
            return divide(*args)

    return divided


@contextmanager
def elements_sent() -> Iterator[list[int]]:
    """Count the elements of tensors that ranks give to the collectives of Megatron-Core's optimizer."""
    sent: list[int] = []

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            sent.append(sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor)))
            return call(*args, **kwargs)

        return called

    names = ("all_gather", "gather", "all_gather_into_tensor", "broadcast", "send")
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name)) for name in names}):
        yield sent


def main(folder: Path) -> dict[str, Any]:
    """Run every case; return the answers of rank 0. Collective."""
    answers: dict[str, Any] = {}
    for tp in (1, 2):
        rank = Rank(tp)
        for form in FORMS:
            with elements_sent() as sent:
                rank.declare(form)
            answers[f"elements sent by {form} at tp {tp}"] = sum(sent)
            for backend in ("torch_dist", "megackpt"):
                rank.save(form, str(folder / f"{form}-{tp}-{backend}"), backend)
        for backend in ("torch_dist", "megackpt"):
            both = [str(folder / f"{form}-{tp}-{backend}") for form in FORMS]
            if dist.get_rank() == 0:
                compared = megackpt.diff(*both)
                answers[f"difference at tp {tp} in {backend}"] = {
                    "equal": compared.is_equal,
                    "compared": compared.compared,
                    "text": str(compared),
                }
        for form, written, of_tp in itertools.product(FORMS, FORMS, (1, 2)[:tp]):
            path = str(folder / f"{written}-{of_tp}-torch_dist")
            answers[f"{written} of tp {of_tp} read as {form} at tp {tp}"] = rank.load(form, path)
    for fraction in (1.0, 0.5):
        rank = Rank(1, offload=fraction)
        paths = {form: str(folder / f"{form}-offload-{fraction}") for form in FORMS}
        with elements_sent() as sent:
            for form, path in paths.items():
                rank.save(form, path)
                answers.setdefault(f"elements sent by {form} with offload {fraction}", sum(sent))
        if dist.get_rank() == 0:
            answers[f"difference with offload {fraction}"] = str(megackpt.diff(*paths.values()))
            answers[f"equal with offload {fraction}"] = megackpt.diff(*paths.values()).is_equal
        for form, written, of_rank in itertools.product(FORMS, FORMS, (fraction, 1.5 - fraction)):
            reader = Rank(1, offload=of_rank)
            read = f"{written} of offload {fraction} by {form} at {of_rank}"
            answers[read] = reader.load(form, paths[written]) * reader.steps_from_states()
    path = str(folder / "buckets")
    rank = Rank(1, overlap=True)
    (buffer,) = parts_of(rank.optimizer)[0].buffers
    rank.save("ranges", path)
    answers["buckets with padding"] = sum(b.grad_data.numel() > b.numel_unpadded for b in buffer.buckets)
    answers["padded buckets read at tp 1"] = rank.load("ranges", path)
    answers["padded buckets read at tp 2"] = Rank(2, overlap=True).load("ranges", path)
    return answers


if __name__ == "__main__":
    answer(main)
