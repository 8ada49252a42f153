"""Megatron-Core's distributed optimizer on two ranks: its state as ranges, and in the form that gathers.

    megatron_ranges.py FOLDER RESULTS.json

as torch.distributed.run starts it. Each case writes its answer under a name; `test_optimizer_ranges.py` says
what has to be in it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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

from megatron.core import dist_checkpointing, distributed, parallel_state  # noqa: E402

import megackpt  # noqa: E402
from megackpt.contrib import megatron  # noqa: E402

FORMS = {"ranges": False, "gathered": True}


class Rank:
    """One rank's model and optimizer, with the oracle's values, at a tensor-parallel size."""

    def __init__(self, tp: int, *, overlap: bool = False) -> None:
        self.job = Job("write", "distopt", "", tp=tp, optimizer_format="fully_reshardable")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp)
        with overlapped_gradients() if overlap else nullcontext():
            self.model = build_model(self.job)
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


@contextmanager
def overlapped_gradients() -> Iterator[None]:
    """Let models be built with many buckets of gradients, which Megatron-Core makes for overlap only."""
    config = distributed.DistributedDataParallelConfig
    sizes = megatron_peer.BUCKET_SIZE, megatron_peer.HIDDEN
    megatron_peer.BUCKET_SIZE, megatron_peer.HIDDEN = 1000, 40  # 40 elements leave a bucket to be padded
    distributed.DistributedDataParallelConfig = partial(_overlapped, config)
    try:
        yield
    finally:
        distributed.DistributedDataParallelConfig = config
        megatron_peer.BUCKET_SIZE, megatron_peer.HIDDEN = sizes


def _overlapped(config: Any, **options: Any) -> Any:
    return config(**{**options, "overlap_grad_reduce": True})


@contextmanager
def elements_sent() -> Iterator[list[int]]:
    """Count the elements of tensors that ranks give to the collectives of Megatron-Core's optimizer."""
    sent: list[int] = []

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            sent.append(sum(arg.numel() for arg in args if isinstance(arg, torch.Tensor)))
            return call(*args, **kwargs)

        return called

    names = [name for name in ("all_gather", "gather", "all_gather_into_tensor", "broadcast", "send")]
    calls = {name: getattr(dist, name) for name in names}
    for name in names:
        setattr(dist, name, counting(calls[name]))
    try:
        yield sent
    finally:
        for name in names:
            setattr(dist, name, calls[name])


def main() -> None:
    """Run every case; rank 0 writes the answers."""
    folder, results = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
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
                answer = {"equal": compared.is_equal, "compared": compared.compared, "text": str(compared)}
                answers[f"difference at tp {tp} in {backend}"] = answer
        for form, written, of_tp in itertools.product(FORMS, FORMS, (1, 2)[:tp]):
            path = str(folder / f"{written}-{of_tp}-torch_dist")
            answers[f"{written} of tp {of_tp} read as {form} at tp {tp}"] = rank.load(form, path)
    path = str(folder / "buckets")
    rank = Rank(1, overlap=True)
    (buffer,) = parts_of(rank.optimizer)[0].buffers
    rank.save("ranges", path)
    answers["buckets with padding"] = sum(b.grad_data.numel() > b.numel_unpadded for b in buffer.buckets)
    answers["padded buckets read at tp 1"] = rank.load("ranges", path)
    answers["padded buckets read at tp 2"] = Rank(2, overlap=True).load("ranges", path)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
