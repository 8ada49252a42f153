"""Megatron-Core as a peer: writes and reads checkpoints of its own models, on four CPU ranks.

Run with the Python of an environment that has a Megatron-Core (see environments.py):

    python megatron_peer.py JOBS.json RESULTS.json [--megackpt]

With `--megackpt` Megatron-Core's models and optimizers are the same, but `megatron.core.dist_checkpointing`
is megackpt (`megackpt.contrib.megatron.install()`).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import dataclasses
import gc
import inspect
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.contrib.megatron.megatron_stand_ins import pretend
from tests.system.interop.jobs import Job, main
from tests.system.interop.oracle import STEP, check_equal, common, oracle, rng_state

VOCAB, SEQUENCE, HIDDEN = 96, 16, 32


def start(flags: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    if "--megackpt" in flags:
        from megackpt.contrib import megatron

        megatron.install()
    pretend()


def run(job: Job) -> None:
    """Write or read one checkpoint, all ranks together."""
    world = World(job)
    (world.write if job.op == "write" else world.read)()


class World:
    """One rank's model and optimizer at the layout of a job."""

    def __init__(self, job: Job) -> None:
        from megatron.core import parallel_state

        self.job = job
        parallel_state.destroy_model_parallel()
        gc.collect()
        parallel_state.initialize_model_parallel(job.tp, job.pp)
        self.model = build_model(job)
        self.optimizer = build_optimizer(job, self.model) if job.kind != "model" else None

    def write(self) -> None:
        """Fill everything from the oracle and save."""
        from megatron.core import dist_checkpointing

        if self.optimizer is not None:
            take_a_step(self.optimizer, steps=STEP)
        fill_model(self.model.sharded_state_dict(), check=False)
        if self.optimizer is not None:
            fill_optimizer(self.optimizer, self.model.sharded_state_dict(), check=False)
        state = self.declare(is_loading=False)
        if dist.get_rank() == 0:
            os.makedirs(self.job.path, exist_ok=True)
        dist.barrier()
        content = {"distrib_optim_sharding_type": self.job.optimizer_format, "singleton_local_shards": False}
        metadata = {"content_metadata": content} if takes(dist_checkpointing.save, "content_metadata") else {}
        dist_checkpointing.save(state, self.job.path, (self.job.backend, self.job.version), **metadata)

    def read(self) -> None:
        """Load into a model and an optimizer with other values; compare bit for bit with the oracle."""
        from megatron.core import dist_checkpointing

        if self.optimizer is not None:
            take_a_step(self.optimizer, steps=1)
        state = self.declare(is_loading=True)
        loaded = dist_checkpointing.load(state, self.job.path)
        self.model.load_state_dict(loaded["model"], strict=True)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(loaded["optimizer"])
        fill_model(self.model.sharded_state_dict(), check=True)
        if self.optimizer is not None:
            fill_optimizer(self.optimizer, self.model.sharded_state_dict(), check=True)
        if self.job.by_megatron:
            compare({key: loaded.get(key) for key in common()}, common(), "")
        if self.job.by_megatron and self.job.same_layout:
            compare(loaded["rng_state"], rng_state(dist.get_rank()), "rng_state")

    def declare(self, *, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state dict of everything, as a training script builds it."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        model = self.model.sharded_state_dict()
        state: dict[str, Any] = {"model": model}
        if not is_loading:
            state.update(common())
        if self.optimizer is not None:
            state["optimizer"] = declare_optimizer(self.optimizer, model, self.job, is_loading)
        if self.job.by_megatron and (not is_loading or self.job.same_layout):
            rank, ranks = dist.get_rank(), dist.get_world_size()
            data = None if is_loading else rng_state(rank)
            state["rng_state"] = ShardedObject("rng_state", data, (ranks,), (rank,), replica_id=0)
        return state


def build_model(job: Job) -> Any:
    """Return this rank's stage of a GPT with four layers; weights are of no importance."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dtype = torch.float32 if job.kind == "adam" else torch.bfloat16
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=48,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=job.tp,
        pipeline_model_parallel_size=job.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = model.to(dtype)
    if job.kind == "model":
        return model
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    distributed = job.kind == "distopt"
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=False,
        bucket_size=BUCKET_SIZE if distributed else None,
    )
    wrapped = DistributedDataParallel(config, ddp, model)
    return Unwrapping(wrapped)


BUCKET_SIZE = 6000  # elements: a few buckets on each stage


class Unwrapping:
    """A model in DistributedDataParallel with the state dicts of the model inside."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def sharded_state_dict(self) -> dict[str, Any]:
        return self.wrapped.module.sharded_state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any], strict: bool) -> None:
        self.wrapped.module.load_state_dict(state, strict=strict)


def build_optimizer(job: Job, model: Unwrapping) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=job.kind == "distopt",
        params_dtype=torch.bfloat16 if job.kind == "distopt" else torch.float32,
        use_distributed_optimizer=job.kind == "distopt",
    )
    return get_megatron_optimizer(config, [model.wrapped])


def parts_of(optimizer: Any) -> list[Any]:
    """Return the optimizers of a chain, or the one that it is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def take_a_step(optimizer: Any, *, steps: int) -> None:
    """Make the states exist, and say how many steps were taken."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        inner.step()
        inner.zero_grad()
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = steps
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def declare_optimizer(optimizer: Any, model: dict[str, Any], job: Job, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state dict of an optimizer in the format that a job asks for."""
    if job.kind != "distopt":
        return optimizer.sharded_state_dict(model, is_loading)  # type: ignore[no-any-return]
    if takes(parts_of(optimizer)[0].sharded_state_dict, "metadata"):
        metadata = {"distrib_optim_sharding_type": job.optimizer_format}
        return optimizer.sharded_state_dict(model, is_loading, metadata=metadata)  # type: ignore[no-any-return]
    return optimizer.sharded_state_dict(model, is_loading, sharding_type=job.optimizer_format)  # type: ignore[no-any-return]


def takes(function: Any, argument: str) -> bool:
    """Return whether this Megatron-Core's function has an argument.

    From 0.13 on, a save has content metadata; from 0.14 on, an optimizer chooses its format by metadata.
    """
    return argument in inspect.signature(function).parameters


def entities_of(declared: Any) -> list[Any]:
    """Return the tensors that a sharded state dict declares, factories built."""
    leaves = all_leaves(declared)
    built = [
        e for leaf in leaves for e in (entities_of(leaf.build()) if hasattr(leaf, "build_fn") else [leaf])
    ]
    return [e for e in built if hasattr(e, "global_offset") and hasattr(e, "local_shape")]


def expected_of(entity: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's part of the oracle, without prepended axes."""
    prepended = len(entity.global_shape) - len(entity.local_shape)
    where: tuple[Any, ...] = tuple(entity.global_offset[:prepended])
    starts = entity.global_offset[prepended:]
    where += tuple(slice(o, o + n) for o, n in zip(starts, entity.local_shape, strict=True))
    return oracle(entity.key, tuple(entity.global_shape), dtype)[where]


@torch.no_grad()
def fill_model(declared: dict[str, Any], *, check: bool) -> None:
    """Fill the model's tensors, or compare them."""
    for entity in entities_of(declared):
        expected = expected_of(entity, entity.data.dtype)
        if check:
            check_equal(entity.data.detach(), expected, entity.key)
        else:
            entity.data.copy_(expected)


@torch.no_grad()
def fill_optimizer(optimizer: Any, declared: dict[str, Any], *, check: bool) -> int:
    """Fill, or compare, main parameters and moments; return the number of elements."""
    leaves = [e for e in all_leaves(declared) if getattr(e, "data", None) is not None]
    by_param = {id(e.data): e for e in leaves}
    count = 0
    for part in parts_of(optimizer):
        for param, tensors, where in states_of(part):
            entity = by_param[id(param)]
            for name, tensor in tensors.items():
                if name == "step":
                    if int(tensor) != STEP:
                        raise ValueError(f"{entity.key}: step is {tensor}, not {STEP}")
                    continue
                whole = whole_state(entity, param, name)
                expected = whole.reshape(-1)[where] if where is not None else whole
                if check:
                    check_equal(tensor.detach(), expected, f"{name} of {entity.key} {where}")
                else:
                    tensor.copy_(expected)
                count += expected.numel()
        for group in part.optimizer.param_groups if check else ():
            if "step" in group and group["step"] != STEP:
                raise ValueError(f"step of a group is {group['step']}, not {STEP}")
    if count == 0:
        raise ValueError("the optimizer has no state")
    return count


def whole_state(entity: Any, param: torch.Tensor, name: str) -> torch.Tensor:
    """Return the oracle's values of one state of a whole local parameter, in the parameter's local shape."""
    stored = "fp32_param" if name == "param" else name
    whole = torch.zeros(param.shape)
    kinds = {} if hasattr(entity, "build_fn") else {"dtype": whole.dtype}
    shadow = dataclasses.replace(entity, key=f"optimizer.state.{stored}.{entity.key}", data=whole, **kinds)
    for share in entities_of([shadow]):
        share.data.copy_(expected_of(share, torch.float32))
    return whole


def states_of(part: Any) -> list[tuple[torch.Tensor, dict[str, torch.Tensor], slice | None]]:
    """Return model parameter, states, and the range of the flat parameter that they stand for."""
    if not hasattr(part, "gbuf_ranges"):
        inner = part.optimizer
        return [(p, inner.state[p], None) for group in inner.param_groups for p in group["params"]]
    results = []
    for buffers in part.gbuf_ranges:
        for buckets in buffers.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    where = slice(ranges["param"].start, ranges["param"].end)
                    results.append((param, part._get_main_param_and_optimizer_states(param), where))
    return results


def all_leaves(declared: Any) -> list[Any]:
    if isinstance(declared, dict):
        return [e for value in declared.values() for e in all_leaves(value)]
    if isinstance(declared, (list, tuple)):
        return [e for value in declared for e in all_leaves(value)]
    return [declared]


def compare(actual: Any, expected: Any, path: str) -> None:
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or set(actual) != set(expected):
            raise ValueError(f"{path}: {actual!r}, expected {expected!r}")
        for key, value in expected.items():
            compare(actual[key], value, f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        check_equal(actual, expected, path)
    elif type(actual) is not type(expected) or actual != expected:
        raise ValueError(f"{path}: {actual!r}, expected {expected!r}")


if __name__ == "__main__":
    main(start, run)
