"""Megatron-Core's model and distributed optimizer in training, with Megatron-LM's calls to checkpointing.

The wheels of Megatron-Core up to 0.16 do not hold `megatron.training`. This makes the same calls as its
`training/checkpointing.py`, in the same order and with the same arguments, on two CPU ranks, as
torch.distributed.run starts them:

    megatron_trainer.py FOLDER LOSSES.json [--megackpt]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.contrib.megatron.megatron_stand_ins import answer
from tests.system.interop.jobs import Job
from tests.system.interop.megatron_peer import SEQUENCE, VOCAB, build_model, build_optimizer, start

start(sys.argv[3:])  # before Megatron-Core is imported

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import serialization  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies import fully_parallel  # noqa: E402
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue  # noqa: E402
from megatron.core.dist_checkpointing.utils import _clean_metadata_for_serialization  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402

from tests.contrib.megatron.test_megatron_trainer import ITERATIONS, SAVE_AT, Run  # noqa: E402

SAMPLES = 4


class Trainer:
    """One rank's model and optimizer at the layout of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        job = Job("write", "distopt", "", tp=run.tp, optimizer_format="fully_reshardable")
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(run.tp)
        initialize_rng_tracker(inference_rng_tracker=True)  # forks nothing: there is no dropout
        torch.manual_seed(3)
        self.model = build_model(job).wrapped
        self.optimizer = build_optimizer(job, Namespace(wrapped=self.model))
        self.iteration = 0
        self.context: dict[str, Any] = {}
        if not run.load:
            self._same_weights_on_all_replicas()

    def _same_weights_on_all_replicas(self) -> None:
        group = parallel_state.get_data_parallel_group()
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, parallel_state.get_data_parallel_src_rank(), group=group)
        self.optimizer.reload_model_params()

    def train(self) -> dict[str, str]:
        """Train; return the losses by iteration."""
        losses: dict[str, str] = {}
        queue = AsyncCallsQueue()
        if self.run.load:
            self.load(self.run.load)
        while self.iteration < ITERATIONS:
            self.iteration += 1
            losses[str(self.iteration)] = self._step().hex()
            queue.maybe_finalize_async_calls(blocking=False)
            if self.run.save and self.iteration == SAVE_AT:
                request = self.save(self.run.save)
                if request is not None:
                    queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        dist.barrier()
        return losses

    def _step(self) -> float:
        group = parallel_state.get_data_parallel_group()
        seeded = torch.Generator().manual_seed(self.iteration % SAVE_AT)
        everything = torch.randint(0, VOCAB, (SAMPLES, SEQUENCE + 1), generator=seeded)
        own_samples = everything.chunk(group.size())[group.rank()]
        positions = torch.arange(SEQUENCE).expand(len(own_samples), SEQUENCE)
        mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(own_samples[:, :-1], positions, mask, labels=own_samples[:, 1:]).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        return float(mean / group.size())

    def save(self, path: str) -> Any:
        """Save as Megatron-LM's save_checkpoint does; return the request of an asynchronous save."""
        metadata = self._metadata()
        state = self._state(metadata, is_loading=False)
        if dist.get_rank() == 0:
            os.makedirs(path)
        dist.barrier()
        strategy = serialization.get_default_save_sharded_strategy("torch_dist")
        strategy.use_cached_ckpt_structure = True
        cached = getattr(self.context.get("load_strategy"), "cached_global_metadata", None)
        if cached is not None:
            strategy.cached_global_metadata = cached
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return dist_checkpointing.save(
            state,
            path,
            fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group, True),
            async_sharded_save=self.run.is_async,
            validate_access_integrity=True,
            preprocess_common_before_consistancy_check=_what_is_compared,
            content_metadata=_clean_metadata_for_serialization(metadata),
        )

    def load(self, path: str) -> None:
        """Load as Megatron-LM's load_checkpoint does: common state first, which says what to ask for."""
        if not dist_checkpointing.check_is_distributed_checkpoint(path):
            raise RuntimeError(f"{path} is no distributed checkpoint")
        common = dist_checkpointing.load_common_state_dict(path)
        if common["args"].attention_backend is not AttnBackend.unfused:
            raise RuntimeError(f"args.attention_backend is {common['args'].attention_backend!r}")
        described = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        request = self._state({**self._metadata(), **described}, is_loading=True)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = fully_parallel.FullyParallelLoadStrategyWrapper(
            serialization.get_default_load_sharded_strategy(path), group
        )
        self.context["load_strategy"] = strategy
        loaded = dist_checkpointing.load(request, path, strategy, strict="assume_ok_unexpected")
        self.model.module.load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])
        self.iteration = loaded["iteration"]

    def _metadata(self) -> dict[str, Any]:
        return {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }

    def _state(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state dict that Megatron-LM's generate_state_dict makes."""
        tp, rank = self.run.tp, parallel_state.get_tensor_model_parallel_rank()
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        model = self.model.module.sharded_state_dict(metadata=metadata)
        state: dict[str, Any] = {
            "args": Namespace(attention_backend=AttnBackend.unfused, exit_signal=signal.SIGTERM, rank=0),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "num_floating_point_operations_so_far": 10.0 * self.iteration,
            "model": model,
            "optimizer": self.optimizer.sharded_state_dict(model, is_loading, metadata=metadata),
        }
        if not is_loading or tp == 1:  # another layout has other generators, and Megatron-LM leaves them out
            generators = [{"random": torch.get_rng_state()}]
            state["rng_state"] = ShardedObject(
                "rng_state", generators, (1, tp), (0, rank), replica_id=replica
            )
        return state


def _what_is_compared(common: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in common.items() if key != "args"}


def train(folder: Path) -> list[dict[str, str]]:
    """Do all runs; return their losses. Collective."""
    runs = json.loads((folder / "runs.json").read_text())
    return [Trainer(Run(**run)).train() for run in runs]


if __name__ == "__main__":
    answer(train)
