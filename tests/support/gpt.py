"""Small GPTs at layouts over all axes, with experts, adapters and other choices, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megackpt import LoadOptions, load, load_common_state_dict, load_plain_tensors
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import ShardedStateDict, is_main_replica
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel import (
    LatentSizes,
    LoRAConfig,
    MambaSizes,
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    RoutingOptions,
    StageTable,
    add_adapters,
    context_share,
    forward_backward,
    share_losses,
)
from megackpt.training.parallel.adapters import adapter_state, reset_magnitudes
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.rng import stable_seed
from models import (
    AttentionConfig,
    DeltaNetConfig,
    GPTConfig,
    LearnedPositions,
    Llama3Scaling,
    MLPConfig,
    MoEConfig,
    MTPConfig,
    NoPositions,
    NormConfig,
    RotaryConfig,
    SlidingWindow,
    build_gpt,
    init_weights,
)
from tests.support.optimizers import tensors_of

MICRO_BATCHES = 8  # in the whole job, divided among dp

CONFIG = GPTConfig(
    vocab_size=29,
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_query_groups=4,
    ffn_hidden_size=24,
    seq_length=8,
    make_vocab_divisible=1,
    linear_bias=True,
    moe=MoEConfig(
        num_experts=8,
        ffn_hidden_size=16,
        routing=RoutingOptions(
            top_k=3,
            score_function="sigmoid",
            scaling_factor=2.5,
            num_groups=4,
            group_top_k=2,
            balance_loss=0.3,
            z_loss=0.02,
            bias_rate=0.01,
        ),
        shared_ffn_hidden_size=16,
        shared_gate=True,
        layer_freq=(0, 1, 1, 1),
    ),
)
# All layers have experts: the arrays of experts have an axis over layers before that over experts.
ALL_MOE = replace(CONFIG, moe=replace(CONFIG.moe, layer_freq=1))
# Latent attention, a first layer without experts, and two layers for further tokens.
LATENT = replace(
    CONFIG,
    num_query_groups=None,
    attention=AttentionConfig(
        latent=LatentSizes(
            kv_lora_rank=10, q_lora_rank=14, qk_head_dim=3, qk_pos_emb_head_dim=4, v_head_dim=5
        )
    ),
    positions=RotaryConfig(interleaved=True),
    mtp=MTPConfig(num_layers=2),
)
# Layers with a gated delta net, attention with an output gate, and one layer without experts.
DELTA_NET = replace(
    CONFIG,
    linear_bias=False,
    norm=NormConfig(zero_centred=True),
    positions=RotaryConfig(fraction=0.5),
    attention=AttentionConfig(qk_norm=True, output_gate=True),
    delta_net=DeltaNetConfig(num_key_heads=4, num_value_heads=8, key_head_dim=6, value_head_dim=5),
    moe=replace(CONFIG.moe, layer_freq=1),
    layer_blocks=(("delta_net", "mlp"), ("delta_net", "moe"), ("attention", "moe"), ("delta_net", "moe")),
)
# Mamba-2 mixers in all layers, which are stacked; and layers of all kinds, with experts that are not gated.
# Some layouts have more ranks in tp than there are groups.
MAMBA = replace(
    CONFIG,
    moe=None,
    mamba=MambaSizes(num_heads=8, head_dim=5, state_size=6, num_groups=2, chunk_size=3, bias=True),
    layer_blocks=(("mamba",),) * 4,
)
HYBRID = replace(
    MAMBA,
    positions=NoPositions(),
    mlp=MLPConfig(gated=False, activation="relu_squared"),
    moe=replace(CONFIG.moe, layer_freq=1, gated=False, shared_gate=False),
    layer_blocks=(("mamba",), ("moe",), ("attention", "mlp"), ("mamba", "moe")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A layout and choices that change no result."""

    layout: ParallelLayout
    sequence_parallel: bool = False
    stages: str | None = None
    optimizer: type[MasterOptimizer] = DistributedOptimizer

    def stage_table(self) -> StageTable | None:
        return None if self.stages is None else StageTable.from_string(self.stages, pp=self.layout.pp)


# Of 8 ranks each. Experts of one stage are on 1, 2, 4 or 8 ranks, in 1, 2 or 4 slices, in 1 to 8 copies.
LAYOUTS = {
    "dp8": Case(ParallelLayout(dp=8)),
    "dp8-ep8": Case(ParallelLayout(dp=8, ep=8)),
    "dp8-ep2-etp2": Case(ParallelLayout(dp=8, ep=2, etp=2)),
    "tp2-dp4-ep2": Case(ParallelLayout(tp=2, dp=4, ep=2), True, optimizer=MixedPrecisionOptimizer),
    "tp4-dp2-ep4-etp1": Case(ParallelLayout(tp=4, dp=2, ep=4, etp=1), True),
    "tp8-ep8-etp1": Case(ParallelLayout(tp=8, ep=8, etp=1)),
    "tp2-cp2-dp2-ep2-etp4": Case(ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=4), True),
    "cp2-dp4-ep8": Case(ParallelLayout(cp=2, dp=4, ep=8)),
    "cp4-dp2-ep2": Case(ParallelLayout(cp=4, dp=2, ep=2), optimizer=MixedPrecisionOptimizer),
    "tp2-pp2-dp2-ep2-etp1": Case(ParallelLayout(tp=2, pp=2, dp=2, ep=2, etp=1), True),
    "pp4-dp2-ep2": Case(ParallelLayout(pp=4, dp=2, ep=2)),
    "cp2-pp2-vpp2-dp2-ep4": Case(ParallelLayout(cp=2, pp=2, vpp=2, dp=2, ep=4)),
    "tp2-pp2-vpp2-dp2-ep4-etp1-uneven": Case(
        ParallelLayout(tp=2, pp=2, vpp=2, dp=2, ep=4, etp=1),
        stages="E|tt|t|tL",
        optimizer=MixedPrecisionOptimizer,
    ),
    "pp2-dp4-etp2-uneven": Case(ParallelLayout(pp=2, dp=4, etp=2), stages="Ettt|tL"),
}


def micro_batches(groups: ParallelGroups, *, seed: int = 3, count: int = MICRO_BATCHES) -> list[MicroBatch]:
    """Return this dp rank's micro-batches of `count` in the whole job, and of them this cp rank's tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randint, 0, CONFIG.vocab_size, (2, 8), generator=generator)
    whole = [(draw(), draw()) for _ in range(count)][groups.dp.rank :: groups.dp.size]
    return [MicroBatch(*(context_share(x, groups.cp, dim=1) for x in batch)) for batch in whole]


def build(
    case: Case,
    config: GPTConfig,
    groups: ParallelGroups,
    *,
    seed: int,
    make: Callable[..., ModelChunks] = build_gpt,
) -> ModelChunks:
    """Return the model chunks of this rank with initial weights of a seed."""
    model = make(config, groups, sequence_parallel=case.sequence_parallel, stages=case.stage_table())
    init_weights(model, seed=seed)
    with torch.no_grad():  # scores far from each other, so that rounding does not change a choice
        for name, param in model.named_parameters():
            if name.endswith("router.weight"):
                param *= 20
    return model


def losses_of(model: ModelChunks, batches: list[MicroBatch], groups: ParallelGroups) -> Tensor:
    """Compute gradients, and return the losses of the micro-batches of this dp rank. Collective."""
    losses = share_losses(forward_backward(model, batches, groups), len(batches), groups)
    return all_reduce(losses, groups.cp) / groups.cp.size


def state_of(model: nn.Module, optimizer: MasterOptimizer, **how: bool) -> dict[str, Any]:
    """Declare what a checkpoint has of the model and its optimizer."""
    declared = model.sharded_state_dict()
    return {"model": declared, "optimizer": optimizer.sharded_state_dict(declared, **how)}


def resume(model: nn.Module, optimizer: MasterOptimizer, source: Path) -> None:
    """Load all that a checkpoint has of the model and its optimizer. Collective."""
    loaded = load(state_of(model, optimizer), source, options=LoadOptions(complete=True))
    optimizer.load_sharded_state_dict(loaded["optimizer"])


def arrays_of(checkpoint: Path, vocab_size: int) -> dict[str, Tensor]:
    """Return all arrays; those of the vocabulary without padding, whose size depends on the layout."""
    arrays = load_plain_tensors(checkpoint)
    padded = {k for k, a in arrays.items() if a.ndim and ("word_embeddings" in k or "output_layer" in k)}
    return {k: a[:vocab_size] if k in padded else a for k, a in arrays.items()}


def assert_equal_checkpoints(first: Path, second: Path, vocab_size: int = CONFIG.vocab_size) -> None:
    """Compare all that two checkpoints have, bit for bit but for padding."""
    a, b = arrays_of(first, vocab_size), arrays_of(second, vocab_size)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].shape == b[key].shape, key
        assert torch.equal(as_bits(a[key]), as_bits(b[key])), f"{key} of {first.name}"
    assert load_common_state_dict(first) == load_common_state_dict(second)


SMALL_GPT = GPTConfig(
    vocab_size=13,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    num_query_groups=2,
    ffn_hidden_size=8,
    seq_length=8,
    make_vocab_divisible=1,
    linear_bias=True,
)
"""A model of few elements. Its heads share keys two by two."""

SMALL_GPT_MOE = replace(
    SMALL_GPT,
    num_query_groups=None,
    moe=MoEConfig(
        num_experts=8,
        ffn_hidden_size=12,
        routing=RoutingOptions(score_function="sigmoid", bias_rate=0.01),
        shared_ffn_hidden_size=8,
        shared_gate=True,
    ),
)
SMALL_GPT_MIXED = replace(SMALL_GPT_MOE, moe=replace(SMALL_GPT_MOE.moe, layer_freq=(0, 1, 1, 0)))

FAMILIES = ("gemma", "gpt2", "gpt-oss")


def as_family(config: GPTConfig, family: str) -> GPTConfig:
    """Return a config of the same sizes with the choices of a family, and some that go with them."""
    return {"gemma": _gemma, "gpt2": _gpt2, "gpt-oss": _gpt_oss}[family](config)


def _gemma(config: GPTConfig) -> GPTConfig:
    local = SlidingWindow(size=3, layers=(True, False) * 2, rotary=RotaryConfig(base=100.0))
    return replace(
        config,
        norm=NormConfig(zero_centred=True, after_blocks=True),
        attention=AttentionConfig(head_dim=6, qk_norm=True, scale=0.3, softcap=2.0, window=local),
        mlp=MLPConfig(activation="gelu_tanh"),
        embedding_scale=5.0,
        logit_softcap=3.0,
    )


def _gpt2(config: GPTConfig) -> GPTConfig:
    return replace(
        config,
        positions=LearnedPositions(count=config.seq_length + 3),
        norm=NormConfig(kind="layer"),
        mlp=MLPConfig(gated=False, activation="gelu_tanh"),
    )


def _gpt_oss(config: GPTConfig) -> GPTConfig:
    """Few key heads, which ranks of tp share."""
    scaling = Llama3Scaling(
        factor=4.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=4
    )
    return replace(
        config,
        num_query_groups=2,
        linear_bias=False,
        tied_embeddings=False,
        positions=RotaryConfig(fraction=0.5, scaling=scaling),
        attention=AttentionConfig(qkv_bias=True, qk_norm=True, sinks=True, window=SlidingWindow(size=3)),
    )


def joined(config: GPTConfig, layout: ParallelLayout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Build every rank's model; return the global arrays and how many main replicas hold each element."""
    boxes: list[Box] = []
    covered: dict[str, Tensor] = {}
    for rank in range(layout.world_size):
        model = build_gpt(config, ParallelGroups.offline(layout, rank))
        init_weights(model, seed=7)
        for t in tensors_of(model.sharded_state_dict()):
            assert t.data is not None
            boxes.append(Box(t.key, t.global_shape, t.global_slice(), t.data.detach()))
            count = covered.setdefault(t.key, torch.zeros(t.global_shape, dtype=torch.int64))
            count[t.global_slice()] += is_main_replica(t.replica_id)
    return join(boxes), covered


class Box(NamedTuple):
    """What one rank has of a global array."""

    key: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    data: Tensor


def gradient_boxes(model: nn.Module, state: ShardedStateDict, groups: ParallelGroups) -> list[Box]:
    """Return this rank's boxes of the gradients, under the keys of the parameters. Collective."""
    grads = {name: reduced(p, groups) for name, p in model.named_parameters() if p.requires_grad}
    entities = {name: e.retarget(key=e.key, data=grads[name]) for name, e in state.items() if name in grads}
    return [Box(t.key, t.global_shape, t.global_slice(), t.data) for t in tensors_of(entities)]


def reduced(param: Tensor, groups: ParallelGroups) -> Tensor:
    """Return the gradient of a parameter as an optimizer reduces it. Collective.

    The loss of each rank is the mean over its own tokens. So gradients of dense layers are averaged over
    dp x cp. Those of an expert are sums over the tokens that it got, from any rank of ep.
    """
    grad = param.grad
    assert grad is not None
    if is_marked(param, "expert_parallel"):
        if is_marked(param, "sequence_parallel"):
            grad = all_reduce(grad, groups.etp)
        return all_reduce(grad, groups.edp) / groups.dp_cp.size
    if is_marked(param, "sequence_parallel"):
        grad = all_reduce(grad, groups.tp)
    if is_marked(param, "shared_embedding"):
        grad = all_reduce(grad, groups.embedding)
    return all_reduce(grad, groups.dp_cp) / groups.dp_cp.size


def join(boxes: Iterable[Box]) -> dict[str, Tensor]:
    """Put the boxes of all ranks together; replicas have to agree bit for bit."""
    whole: dict[str, Tensor] = {}
    for key, shape, box, data in boxes:
        joined = whole.setdefault(key, torch.full(shape, float("nan")))
        known = ~joined[box].isnan()
        assert torch.equal(joined[box][known], data[known]), f"replicas of {key} differ"
        joined[box] = data
    return whole


def assert_close(actual: Tensor, expected: Tensor, what: str, *, relative: float) -> None:
    """Compare element by element, relative to the largest element."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= relative, f"{what}: off by {error:.1e} of the largest element"


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, relative: float
) -> None:
    """Compare arrays by key, each relative to its largest element."""
    assert actual.keys() == expected.keys()
    for key in expected:
        assert_close(actual[key], expected[key], key, relative=relative)


# No layout pads this vocabulary. With tp 4, two ranks have each key head.
LORA_CONFIG = replace(CONFIG, tied_embeddings=False, vocab_size=32, num_query_groups=2)

LORA_LAYOUTS = {
    "one": Case(ParallelLayout()),
    "tp2-dp2-ep2-sequence": Case(ParallelLayout(tp=2, dp=2, ep=2), True),
    "dp4-ep2-etp2": Case(ParallelLayout(dp=4, ep=2, etp=2)),
    "tp4-sequence": Case(ParallelLayout(tp=4), True),
    "tp2-pp2-vpp2-ep2-etp1": Case(ParallelLayout(tp=2, pp=2, vpp=2, ep=2, etp=1), True),
    "cp2-pp2-uneven": Case(ParallelLayout(cp=2, pp=2), stages="Ettt|tL"),
}

ADAPTERS = {
    # Components of a fused layer with matrices of their own, and DoRA.
    "attention": LoRAConfig(
        rank=8, targets=("linear_qkv.v", "linear_qkv.q", "linear_proj"), alpha=16, dora=True
    ),
    # One matrix for all components, of dense layers, experts and shared experts; replicated layers.
    "mlp": LoRAConfig(rank=16, targets=("linear_fc1", "linear_fc2"), alpha=8, rank_stabilised=True),
}


def build_with_adapters(name: str, groups: ParallelGroups, *, seed: int) -> ModelChunks:
    """Return this rank's model with adapters; the weights of a seed, and initial values of adapters."""
    model = build(LORA_LAYOUTS[name], LORA_CONFIG, groups, seed=seed)
    for adapter, config in ADAPTERS.items():
        add_adapters(model, config, groups, name=adapter, seed=5)
        reset_magnitudes(model, adapter)
    return model


def randomise_adapters(state: ShardedStateDict) -> None:
    """Give B and the magnitudes random values, so that each adapter changes the outputs."""
    for tensor in tensors_of(adapter_state(state)):
        if ".linear_in." in tensor.key:
            continue
        generator = torch.Generator().manual_seed(stable_seed("random", tensor.key))
        whole = torch.randn(tensor.global_shape, generator=generator) * 0.1
        with torch.no_grad():
            tensor.data.add_(whole[tensor.global_slice()])
