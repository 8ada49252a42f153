"""Models of the real Megatron-Core on CPU ranks: built, run and saved, for the tests in this folder.

Every function runs in a worker of a RankPool. Of Megatron-Core nothing is replaced but what stands for a GPU;
`without_gpu` says what it takes to run it where torch has no CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import megackpt
from megackpt.contrib import megatron
from megackpt.entities.flatten import flatten_state
from megackpt.maps import Family, checkpoint_map, family_of

VOCAB, SEQUENCE, BATCH, HIDDEN = 64, 16, 2, 32
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Case:
    """One architecture, under a name for test ids.

    Attributes:
        experts: number of experts of each layer; 0 for a dense MLP.
        sigmoid: sigmoid scores with a bias for each expert, instead of a softmax.
        shared: extent inside of the shared experts; 0 for none.
        every: experts in layers 0, n, 2n, ...
        groups: key and value heads; there are 8 query heads.
        singletons: each expert, and each of gate and up, is saved under a key of its own.
    """

    name: str
    norm: str = "RMSNorm"
    tied: bool = False
    rope: bool = True
    swiglu: bool = True
    experts: int = 0
    sigmoid: bool = False
    shared: int = 0
    every: int = 1
    groups: int = 4
    qk_norm: bool = False
    singletons: bool = False


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided; dp is what remains of the world."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    world: int = 0

    @property
    def ranks(self) -> int:
        return self.world or self.tp * self.pp * self.ep

    def __str__(self) -> str:
        return f"tp{self.tp}pp{self.pp}ep{self.ep}x{self.ranks}"


def start(layout: Layout, seed: int) -> None:
    """Make this rank ready to build a model of Megatron-Core at a layout. Collective."""
    without_gpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    parallel_state.destroy_model_parallel()
    gc.collect()
    parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
    initialize_rng_tracker(inference_rng_tracker=True)
    torch.manual_seed(seed * 1000 + dist.get_rank())


def options_of(layout: Layout) -> dict[str, Any]:
    """Return options of every model's config: its layout, and neither kernels nor dropout."""
    return {
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_token_dispatcher_type": "allgather",
        "moe_aux_loss_coeff": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "pipeline_dtype": torch.float32,
    }


def gpt_of(config: Any, spec: Any, **options: Any) -> Any:
    """Return this rank's stage of a GPTModel with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        **options,
    ).eval()


def build(case: Case, layout: Layout, *, seed: int, installed: bool) -> Any:
    """Return this rank's part of a GPTModel with random weights; collective.

    With `installed` Megatron-Core is imported after `megatron.install()`, without it before: a worker can do
    one of both.
    """
    if installed:
        megatron.install()
    start(layout, seed)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    moe = {
        "num_moe_experts": case.experts,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid" if case.sigmoid else "softmax",
        "moe_router_enable_expert_bias": case.sigmoid,
        "moe_shared_expert_intermediate_size": case.shared or None,
        "moe_layer_freq": case.every,
    }
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=8,
        num_query_groups=case.groups,
        qk_layernorm=case.qk_norm,
        ffn_hidden_size=48,
        gated_linear_unit=case.swiglu,
        activation_func=torch.nn.functional.silu if case.swiglu else torch.nn.functional.gelu,
        add_bias_linear=not case.swiglu,
        normalization=case.norm,
        **options_of(layout),
        **(moe if case.experts else {}),
    )
    if case.every > 1:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=case.norm)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=case.experts or None, normalization=case.norm, qk_layernorm=case.qk_norm
        )
    positions = "rope" if case.rope else "learned_absolute"
    return gpt_of(
        config, spec, position_embedding_type=positions, share_embeddings_and_output_weights=case.tied
    )


def tokens() -> torch.Tensor:
    """Return the tokens `[b, s]` whose logits are computed."""
    return torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits_of(model: Any, **options: Any) -> torch.Tensor | None:
    """Return what ranks of the last stage compute of the tokens, None on others; collective."""
    from megatron.core import parallel_state

    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()
    if not first:
        received = torch.empty(SEQUENCE, BATCH, HIDDEN)
        dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(received)
    output = model(tokens(), positions, mask, **options if last else {})
    if not last:
        dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return output if last else None


def of_last_stage(answers: Sequence[Answer | None]) -> Answer:
    """Return what a rank of the last stage answered, where the others answer None."""
    return next(answer for answer in reversed(answers) if answer is not None)


def without_gpu() -> None:
    """Answer for the GPU that this torch does not have.

    Megatron-Core 0.16.1 puts tensors on `torch.cuda.current_device()` and calls `Tensor.cuda()` even where
    everything else is on CPU: torch, not Megatron-Core, is told that this device is the CPU. Its save waits
    for the GPU. And where
    Transformer Engine is absent its `moe_utils` never defines a name that it then compares with None.
    """
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def oracle(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the whole global array that a key stands for: the same at every layout."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
    values = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values + 1 if "norm" in key and key.endswith("weight") else values


def tensors_of(sharded_state_dict: dict[str, Any]) -> Sequence[Any]:
    """Return all tensors of a sharded state dict."""
    return flatten_state(sharded_state_dict, rank=dist.get_rank(), ranks=dist.get_world_size()).tensors


@torch.no_grad()
def fill(sharded_state_dict: dict[str, Any]) -> None:
    """Write this rank's part of the oracle into every tensor of a sharded state dict."""
    for entity in tensors_of(sharded_state_dict):
        entity.data.copy_(oracle(entity.key, entity.global_shape)[entity.global_slice()])


def save_filled(case: Case, layout: Layout, path: str, installed: bool) -> torch.Tensor | None:
    """Build, fill from the oracle, save; return the logits on the last stage."""
    model = build(case, layout, seed=1, installed=installed)
    state = model.sharded_state_dict()
    fill(state)
    _faces(installed).save(state, path)
    return logits_of(model)


def save_legacy(case: Case, layout: Layout, path: str) -> None:
    """Build, fill from the oracle, and write as Megatron-LM does with `--ckpt-format torch`. Collective."""
    from megatron.core import parallel_state

    model = build(case, layout, seed=1, installed=False)
    fill(model.sharded_state_dict())
    if parallel_state.get_data_parallel_rank() > 0:
        return
    stage = f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if layout.pp > 1 else ""
    folder = os.path.join(path, f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}{stage}")
    args = Namespace(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        swiglu=case.swiglu,
        untie_embeddings_and_output_weights=not case.tied,
        params_dtype=torch.float32,
        num_layers=4,
    )
    value = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.state_dict_for_save_checkpoint(),
        "rng_state": [{"seed": dist.get_rank()}],
    }
    os.makedirs(folder)
    torch.save(value, os.path.join(folder, "model_optim_rng.pt"))


def save_genuine(case: Case, layout: Layout, path: str) -> torch.Tensor | None:
    """Build, fill from the oracle, save with Megatron-Core itself; return the logits on the last stage."""
    model = build(case, layout, seed=1, installed=False)
    metadata = {"singleton_local_shards": True} if case.singletons else None
    save_genuinely(model.sharded_state_dict(metadata=metadata), path)
    return logits_of(model)


def save_genuinely(state: dict[str, Any], path: str) -> None:
    """Fill a sharded state dict from the oracle, and save it with Megatron-Core itself. Collective."""
    from megatron.core import dist_checkpointing

    fill(state)
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
    dist.barrier()
    with may_start_processes():
        dist_checkpointing.save(state, path)


@contextlib.contextmanager
def may_start_processes() -> Iterator[None]:
    """Let this worker, a daemonic process, start one, as Megatron-Core does for the queues of a save."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False
    try:
        yield
    finally:
        process._config["daemon"] = True


def load_folder(case: Case, layout: Layout, folder: str, config: dict[str, Any]) -> torch.Tensor | None:
    """Build a model, load a Hugging Face folder; return its logits."""
    model = build(case, layout, seed=2, installed=False)
    load_weights(model, model.sharded_state_dict(), folder, family_of(config), config)
    return logits_of(model)


@torch.no_grad()
def load_weights(
    model: Any, state: dict[str, Any], folder: str, family: Family, config: dict[str, Any]
) -> None:
    """Load a Hugging Face folder by the map of a family into all that a model has. Collective."""
    for value in model.state_dict().values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.fill_(float("nan"))  # whatever is not loaded shows
    keys: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(keys, {tensor.key for tensor in tensors_of(state)})
    made = checkpoint_map(family, config, set().union(*keys))
    weights = {name: entity for name, entity in state.items() if not name.endswith("_extra_state")}
    model.load_state_dict(megackpt.load(weights, folder, maps=made), strict=False)


def load_and_save(
    case: Case, layout: Layout, path: str, copy: str, installed: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Load into a model with other weights and save it again; return its logits and those of the oracle."""
    model = build(case, layout, seed=2, installed=installed)
    face = _faces(installed)
    model.load_state_dict(face.load(model.sharded_state_dict(), path))
    face.save(model.sharded_state_dict(), copy)
    loaded = logits_of(model)
    fill(model.sharded_state_dict())
    expected = logits_of(model)
    return None if loaded is None or expected is None else (loaded, expected)


def load_legacy(case: Case, layout: Layout, path: str) -> bool:
    """Load the weights of a folder of Megatron-LM; return whether all are the oracle's."""
    model = build(case, layout, seed=2, installed=False)
    state = {k: v for k, v in model.sharded_state_dict().items() if not k.endswith("_extra_state")}
    model.load_state_dict(megackpt.load(state, path), strict=False)
    loaded = {name: value.clone() for name, value in model.named_parameters()}
    fill(model.sharded_state_dict())
    return all(torch.equal(value, loaded[name]) for name, value in model.named_parameters())


def kinds(case: Case, layout: Layout, installed: bool) -> set[tuple[str, str]]:
    """Return module and name of the class of every leaf of a model's sharded state dict."""
    model = build(case, layout, seed=1, installed=installed)
    return {(type(v).__module__, type(v).__name__) for v in model.sharded_state_dict().values()}


def save_adam(case: Case, layout: Layout, path: str) -> None:
    """Save a model and its Adam states after a step whose gradients are the oracle's, with install()."""
    _, state = _adam_state(case, layout)
    _faces(True).save(state, path)


def load_adam(case: Case, layout: Layout, path: str, copy: str) -> None:
    """Load model and Adam states, wiped before, and save them again, with install()."""
    optimizer, state = _adam_state(case, layout)
    for entity in tensors_of(state):
        entity.data.detach().zero_()
    face = _faces(True)
    loaded = face.load(state, path)
    optimizer.load_state_dict(loaded["optimizer"])
    assert all(s["step"] == 1 for s in optimizer.state.values())
    face.save(state, copy)


def _adam_state(case: Case, layout: Layout) -> tuple[Any, dict[str, Any]]:
    model = build(case, layout, seed=1, installed=True)
    from megatron.core.dist_checkpointing import optimizer as helpers

    declared = model.sharded_state_dict()
    fill(declared)
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params)
    by_id = helpers.get_param_id_to_sharded_param_map(declared, params)
    for number, param in enumerate(params):
        param.grad = torch.empty_like(param)
        fill({"grad": helpers.make_sharded_optimizer_tensor(by_id[number], param.grad, "grad")})
    optimizer.step()
    states = optimizer.state_dict()
    helpers.optim_state_to_sharding_state(states, by_id)
    return optimizer, {"model": declared, "optimizer": states}


def _faces(installed: bool) -> Any:
    """Return what saves and loads: Megatron-Core's module path, or megackpt itself."""
    if not installed:
        return megackpt
    from megatron.core import dist_checkpointing

    return dist_checkpointing
