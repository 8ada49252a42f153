"""Mixers of tokens: latent, cross and grouped attention, Mamba-2, gated delta nets, and shares of sequences.

What they compute, what is stored at which layout, and what is an error. Latent and cross attention are tested
at several layouts with the models that are made of them (DeepSeek-V3, T5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from megackpt import CoverageError, DeclarationError, ShardedTensor, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    Axis,
    CrossAttention,
    GatedDeltaNet,
    LatentAttention,
    LatentSizes,
    MambaMixer,
    MambaSizes,
    ParallelGroups,
    ParallelLayout,
    QKVParallelLinear,
    causal_attention,
    context_positions,
    context_share,
    mamba,
)
from megackpt.training.parallel.attention import join_heads, split_heads
from megackpt.training.parallel.causal_conv import CausalConv1d
from megackpt.training.parallel.context import (
    AttentionPart,
    attention_parts,
    join_context,
    own_heads,
    tokens_to_heads,
)
from megackpt.training.parallel.delta_net import gated_delta_rule
from megackpt.training.parallel.mamba import GatedGroupNorm, selective_scan
from models import AttentionConfig, DeltaNetConfig, build_gpt
from tests.support.effort import few
from tests.support.gpt import SMALL_GPT, joined
from tests.support.optimizers import tensors_of

ONE = ParallelGroups.create(ParallelLayout())
HIDDEN, HEADS, TOKENS, BATCH = 12, 3, 7, 2
SIZES = LatentSizes(
    kv_lora_rank=5, q_lora_rank=6, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3, norm_eps=1e-5
)
RELATIVE = 1e-5  # float32: two products with sums of at most 18 terms, and a softmax


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(generator=generator)


def hidden(tokens: int, seed: int) -> Tensor:
    return torch.randn(tokens, BATCH, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= RELATIVE * expected.abs().max()


def test_cross_attention_is_that_of_torch() -> None:
    layer = CrossAttention(HIDDEN, HEADS, HIDDEN // HEADS, ONE, bias=True, output_bias=True)
    randomise(layer)
    theirs = nn.MultiheadAttention(HIDDEN, HEADS)
    keys, values = layer.linear_kv.split(layer.linear_kv.weight.T)
    key_bias, value_bias = layer.linear_kv.split(layer.linear_kv.bias)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([layer.linear_q.weight, keys.T, values.T]))
        theirs.in_proj_bias.copy_(torch.cat([layer.linear_q.bias, key_bias, value_bias]))
    theirs.out_proj.load_state_dict(layer.linear_proj.state_dict())
    x, memory = hidden(TOKENS, 1), hidden(TOKENS + 2, 2)
    bias = torch.randn(BATCH, HEADS, TOKENS, TOKENS + 2, generator=torch.Generator().manual_seed(3))
    expected, _ = theirs(x, memory, memory, attn_mask=bias.flatten(0, 1), need_weights=False)
    assert_close(layer(x, memory, bias), expected)


class Turned(LatentAttention):
    """Positions that are seen in the result: each part is multiplied by its position."""

    def with_positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(q.shape[2], dtype=q.dtype)[:, None]
        return q * numbers, k * numbers


@pytest.mark.parametrize("q_rank", [6, None])
def test_latent_attention_is_that_of_its_definition(q_rank: int | None) -> None:
    sizes = LatentSizes(
        kv_lora_rank=5, q_lora_rank=q_rank, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3
    )
    layer: Any = Turned(HIDDEN, HEADS, sizes, ONE, scale=0.3)
    randomise(layer)
    x = hidden(TOKENS, 1)
    if q_rank is None:
        queries = x @ layer.linear_q_proj.weight.T
    else:
        queries = layer.q_layernorm(x @ layer.linear_q_down_proj.weight.T) @ layer.linear_q_up_proj.weight.T
    features, rotary = (x @ layer.linear_kv_down_proj.weight.T).split([5, 2], dim=-1)
    kv = split_heads(layer.kv_layernorm(features) @ layer.linear_kv_up_proj.weight.T, 7)
    numbers = torch.arange(TOKENS, dtype=x.dtype)[:, None]
    q = split_heads(queries, 6)
    q = torch.cat([q[..., :4], q[..., 4:] * numbers], dim=-1)
    k_rotary = (split_heads(rotary, 2) * numbers).expand(-1, HEADS, -1, -1)
    k = torch.cat([kv[..., :4], k_rotary], dim=-1)
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), -1e9)
    expected = F.linear(join_heads(scores.softmax(dim=-1) @ kv[..., 4:]), layer.linear_proj.weight)
    assert_close(layer(x), expected)


def test_what_latent_attention_declares_has_the_names_of_megatron_core() -> None:
    layer = LatentAttention(HIDDEN, HEADS, SIZES, ONE, bias=True)
    assert layer.scale == SIZES.head_dim**-0.5
    assert {key: tuple(entity.global_shape) for key, entity in layer.sharded_state_dict().items()} == {
        "linear_q_down_proj.weight": (6, HIDDEN),
        "linear_q_down_proj.bias": (6,),
        "q_layernorm.weight": (6,),
        "linear_q_up_proj.weight": (18, 6),
        "linear_kv_down_proj.weight": (7, HIDDEN),
        "linear_kv_down_proj.bias": (7,),
        "kv_layernorm.weight": (5,),
        "linear_kv_up_proj.weight": (21, 5),
        "linear_proj.weight": (HIDDEN, 9),
    }


QUERY_HEADS, HEAD_DIM, QUERY_HIDDEN = 8, 2, 3
LAYOUTS = st.builds(ParallelLayout, tp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 3))


def declared(layout: ParallelLayout, kv_heads: int, rank: int) -> dict[str, Any]:
    """Declare the layer and its optimizer's state, whose shards begin and end inside of heads."""
    groups = ParallelGroups.offline(layout, rank)
    layer = QKVParallelLinear(QUERY_HIDDEN, QUERY_HEADS, kv_heads, HEAD_DIM, groups)
    optimizer = DistributedOptimizer(
        layer.parameters(), lambda g: torch.optim.AdamW(g, lr=0.1), groups, bucket_size=20
    )
    model = layer.sharded_state_dict()
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model)["state"]}


def expected(tensor: ShardedTensor) -> torch.Tensor:
    """Return what a rank should hold of an array whose elements follow from its key."""
    generator = torch.Generator().manual_seed(len(tensor.key) + sum(tensor.key.encode()))
    whole = torch.randn(tensor.global_shape, generator=generator)
    return whole[tensor.global_coordinates()].to(tensor.dtype) if tensor.global_shape else whole


def fill(state: dict[str, Any]) -> dict[str, Any]:
    for tensor in tensors_of(state):
        assert tensor.data is not None
        with torch.no_grad():
            tensor.data.copy_(expected(tensor).view(tensor.data.shape))
    return state


@settings(max_examples=few(12, of=400), deadline=None, suppress_health_check=list(HealthCheck))
@given(kv_heads=st.sampled_from([1, 2]), source=LAYOUTS, target=LAYOUTS)
def test_any_layout_loads_what_any_other_saved(
    kv_heads: int, source: ParallelLayout, target: ParallelLayout
) -> None:
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        # Also proves that every element has exactly one main replica.
        save(fill(declared(source, kv_heads, group.rank)), store, group=group)

    def load_rank(group: Group) -> None:
        state = declared(target, kv_heads, group.rank)
        for tensor in tensors_of(state):
            assert tensor.data is not None
            with torch.no_grad():
                tensor.data.fill_(float("nan"))
        load(state, store, group=group)
        for tensor in tensors_of(state):
            assert tensor.data is not None
            assert torch.equal(tensor.data.reshape(-1), expected(tensor).reshape(-1)), tensor.key

    SimulatedWorld(source.world_size).run(save_rank)
    arrays = load_plain_tensors(store)
    assert arrays["weight.k"].shape == (kv_heads * HEAD_DIM, QUERY_HIDDEN)
    assert arrays["optimizer.state.exp_avg.bias.v"].shape == (kv_heads * HEAD_DIM,)
    SimulatedWorld(target.world_size).run(load_rank)


def test_a_copy_that_is_declared_as_a_main_replica_raises_an_error() -> None:
    layout = ParallelLayout(tp=4)

    def save_rank(group: Group) -> None:
        state = declared(layout, 2, group.rank)
        weight = state["model"]["weight"]
        weight.components = tuple(
            type(p)(p.name, p.view, p.global_shape, p.global_offset, p.axis_fragmentations)
            for p in weight.components
        )
        save(state, MemoryStore(), group=group)

    with pytest.raises(CoverageError, match=r"weight\.k"):
        SimulatedWorld(4).run(save_rank)


def _axes(size: int) -> list[Axis]:
    return [ParallelGroups.offline(ParallelLayout(cp=size), rank).cp for rank in range(size)]


def test_a_rank_has_one_part_of_each_half_as_in_megatron() -> None:
    assert [context_positions(8, cp).tolist() for cp in _axes(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [context_positions(8, cp).tolist() for cp in _axes(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert context_positions(3, _axes(1)[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_cut_by_position_and_joined_again_along_any_dim(size: int) -> None:
    length = 2 * size * 3
    tokens = torch.arange(2 * length).view(2, length)
    hidden = torch.arange(length * 2 * 5).view(length, 2, 5)
    shares = [context_share(tokens, cp, dim=1) for cp in _axes(size)]
    states = [context_share(hidden, cp, dim=0) for cp in _axes(size)]
    for cp, share, state in zip(_axes(size), shares, states, strict=True):
        positions = context_positions(length, cp)
        assert torch.equal(share, tokens[:, positions])
        assert torch.equal(state, hidden[positions])
    assert torch.equal(join_context(shares, dim=1), tokens)
    assert torch.equal(join_context(shares, dim=-1), tokens)
    assert torch.equal(join_context(states, dim=0), hidden)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0, 0, 1], [1, 2, 2]]),  # with as many heads of values for each: 0 1 2, 3 4 5 of 6
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_ranks_have_equally_many_heads_some_of_them_as_copies(
    heads: int, size: int, expected: list[list[int]]
) -> None:
    rows = torch.arange(heads).repeat_interleave(2).view(2 * heads, 1)  # of 2 channels each
    for cp, own in zip(_axes(size), expected, strict=True):
        assert own_heads(rows, heads, cp)[::2, 0].tolist() == own
        assert own_heads(rows, heads, cp)[1::2, 0].tolist() == own


def test_one_rank_of_cp_has_all_heads_of_all_tokens_already() -> None:
    (cp,) = _axes(1)
    x = torch.zeros(3, 1, 2)
    assert tokens_to_heads([x], [2], cp)[0] is x


@pytest.mark.parametrize(("window", "scale"), [(None, 0.3), (2, None), (5, 0.7), (9, None)])
def test_attention_with_a_window_and_a_scale_is_that_of_the_definition(
    window: int | None, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=generator).unbind()
    scores = q @ k.transpose(-1, -2) * (0.5 if scale is None else scale)
    mask = AttentionPart(q, k, v, window).mask
    expected = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v
    actual = causal_attention(q, k, v, _axes(1)[0], window=window, scale=scale)
    torch.testing.assert_close(actual, expected)


def test_without_cp_attention_has_one_part_of_the_same_tensors() -> None:
    q, k, v = torch.zeros(3, 1, 2, 5, 4).unbind()  # an odd number of tokens
    (part,) = attention_parts(q, k, v, _axes(1)[0])
    assert part.queries is q
    assert part.keys is k
    assert part.values is v


@pytest.mark.parametrize("length", [6, 2, 7])
def test_a_sequence_that_cannot_be_cut_is_an_error_with_what_fits(length: int) -> None:
    message = rf"sequence of {length} tokens .* 2 x cp=2 = 4 equal parts.*multiple of 4"
    with pytest.raises(DeclarationError, match=message) as caught:
        context_share(torch.zeros(1, length), _axes(2)[1], dim=1)
    assert caught.value.rank == 1
    with pytest.raises(DeclarationError, match=message):
        context_positions(length, _axes(2)[0])


@pytest.mark.parametrize("window", [None, 1, 2, 6, 9])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 5), (2, 6), (1, 4), (1, 5)])
def test_a_query_attends_to_its_own_position_and_those_before_it_in_its_window(
    queries: int, keys: int, window: int | None
) -> None:
    heads, width = 6, 7  # neither is a number of positions
    q, k, v = torch.zeros(heads, queries, width), torch.zeros(heads, keys, width), torch.zeros(heads, keys, 2)
    part = AttentionPart(q, k, v, window)
    first = keys - queries  # the position of the first query
    expected = [
        [key <= first + query and (window is None or key > first + query - window) for key in range(keys)]
        for query in range(queries)
    ]
    assert part.mask.tolist() == expected
    assert part.is_square == (queries == keys)


MAMBA_SIZES = MambaSizes(num_heads=4, head_dim=3, state_size=5, num_groups=2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def token_by_token(x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return what `selective_scan` does, as the recurrence is defined."""
    heads = x.shape[2]
    state, outputs = torch.zeros(x.shape[1], heads, x.shape[3], b.shape[3], dtype=x.dtype), []
    for t in range(len(x)):
        for head in range(heads):
            group = head // (heads // b.shape[2])
            decay = (steps[t, :, head] * rates[head]).exp()[:, None, None]
            added = steps[t, :, head, None] * x[t, :, head]
            state[:, head] = decay * state[:, head] + added[..., None] * b[t, :, group, None]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, c[t].repeat_interleave(heads // c.shape[2], 1)))
    return torch.stack(outputs)


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100])
def test_the_scan_is_the_recurrence_whatever_the_chunks_are(chunk_size: int) -> None:
    x, b, c = random(11, 2, 4, 3), random(11, 2, 2, 5, seed=1), random(11, 2, 2, 5, seed=2)
    steps, rates = F.softplus(random(11, 2, 4, seed=3)), -random(4, seed=4).exp()
    expected = token_by_token(x, steps, rates, b, c)
    actual = selective_scan(x, steps, rates, b, c, chunk_size=chunk_size)
    # float64: the order of sums differs. A decay that is missing is off by parts of a hundred.
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_steps_that_forget_everything_stay_finite() -> None:
    x, b, c = random(6, 1, 1, 2), random(6, 1, 1, 3, seed=1), random(6, 1, 1, 3, seed=2)
    steps, rates = torch.full((6, 1, 1), 400.0, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)
    x.requires_grad_()
    out = selective_scan(x, steps, rates, b, c, chunk_size=4)
    out.sum().backward()
    assert x.grad is not None
    assert bool(out.isfinite().all())
    assert bool(x.grad.isfinite().all())


def test_the_norm_divides_each_group_by_its_own_root_mean_square() -> None:
    norm = GatedGroupNorm(6, 2, ONE, eps=0.0)
    y, z = random(2, 1, 6).float(), random(2, 1, 6, seed=1).float()
    out = norm(y, z)
    gated = y * F.silu(z)
    for group in (slice(0, 3), slice(3, 6)):
        expected = gated[..., group] / gated[..., group].square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(out[..., group], expected)


def test_ranks_that_share_a_group_divide_by_the_root_mean_square_of_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    y, z = random(2, 1, 8).float(), random(2, 1, 8, seed=1).float()
    expected = GatedGroupNorm(8, 2, ONE, eps=0.0)(y, z)
    sent: list[Tensor] = []

    def outputs_of(reduced: Callable[[Tensor, object], Tensor]) -> Tensor:
        monkeypatch.setattr(mamba, "reduce_from", reduced)
        monkeypatch.setattr(mamba, "copy_to", lambda x, axis: x)
        outputs = []
        for rank in range(4):
            norm = GatedGroupNorm(8, 2, ParallelGroups.offline(ParallelLayout(tp=4), rank), eps=0.0)
            own = slice(2 * rank, 2 * rank + 2)
            outputs.append(norm(y[..., own], z[..., own]))
        return torch.cat(outputs, -1)

    def send(x: Tensor, axis: object) -> Tensor:
        sent.append(x)
        return x

    outputs_of(send)
    torch.testing.assert_close(outputs_of(lambda x, axis: torch.stack(sent).sum(0)), expected)


def test_a_mixer_in_bfloat16_has_some_parameters_in_float32() -> None:
    mixer = MambaMixer(8, MambaSizes(num_heads=4, head_dim=3, state_size=5), ONE, dtype=torch.bfloat16)
    wide = {name for name, param in mixer.named_parameters() if param.dtype == torch.float32}
    assert wide == {"A_log", "D", "dt_bias"}
    out = mixer(random(7, 2, 8).bfloat16())
    assert (out.dtype, out.shape) == (torch.bfloat16, (7, 2, 8))
    out.sum().backward()
    assert all(param.grad is not None for param in mixer.parameters())


DELTA_SIZES = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=3)
CONFIG = replace(
    SMALL_GPT,
    linear_bias=False,
    attention=AttentionConfig(output_gate=True),
    delta_net=DELTA_SIZES,
    layer_blocks=(("delta_net", "mlp"), ("attention", "mlp")) * 2,
)


def test_the_state_returns_the_last_value_of_each_key() -> None:
    """Without decay, and with keys at right angles, the state is a dictionary."""
    keys = torch.eye(3)[[0, 1, 2, 1]].view(4, 1, 1, 3)
    values = torch.randn(4, 1, 1, 2, generator=torch.Generator().manual_seed(0))
    queries = torch.eye(3)[[0, 0, 1, 1]].view(4, 1, 1, 3) * 7  # only their direction counts
    written = torch.ones(4, 1, 1)
    out = gated_delta_rule(queries, keys, values, torch.zeros(4, 1, 1), written)
    torch.testing.assert_close(out, values[[0, 0, 1, 3]] * 3**-0.5)
    decayed = gated_delta_rule(queries, keys, values, torch.full((4, 1, 1), -0.5), written)
    ages = torch.tensor([0.0, 1, 1, 0]).view(4, 1, 1, 1)
    torch.testing.assert_close(decayed, out * (-0.5 * ages).exp())


def test_the_convolution_sees_a_token_and_those_before_it() -> None:
    conv = CausalConv1d({"x": 2, "y": 1}, 3, ONE)
    assert conv.bias is not None
    with torch.no_grad():
        conv.bias += torch.arange(3.0)
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    out = conv(x)
    for token in range(5):
        seen = x[max(token - 2, 0) : token + 1]
        expected = torch.einsum("sbc,cs->bc", seen, conv.weight[:, 0, 3 - len(seen) :]) + conv.bias
        torch.testing.assert_close(out[token], expected)
    assert [part.shape[-1] for part in conv.split(out)] == [2, 1]


@pytest.mark.parametrize("layout", [ParallelLayout(tp=2), ParallelLayout(tp=2, pp=2), ParallelLayout(pp=4)])
def test_every_layout_has_the_same_arrays_and_each_element_once(layout: ParallelLayout) -> None:
    arrays, covered = joined(CONFIG, layout)
    expected, _ = joined(CONFIG, ParallelLayout())
    assert arrays.keys() == expected.keys()
    for key, whole in expected.items():  # tp pads the vocabulary
        assert torch.equal(arrays[key][: len(whole)], whole), key
    assert all(bool((count == 1).all()) for count in covered.values())
    assert arrays["decoder.layers.2.self_attention.in_proj.weight.z"].shape == (12, 16)
    assert arrays["decoder.layers.2.self_attention.conv1d.weight.key"].shape == (8, 1, 4)
    assert arrays["decoder.layers.3.self_attention.linear_qkv.weight.gate"].shape == (16, 16)


def test_some_parameters_are_float32_in_a_model_in_bfloat16() -> None:
    model = build_gpt(replace(CONFIG, params_dtype=torch.bfloat16), ONE)
    wide = {t.key for t in tensors_of(model.sharded_state_dict()) if t.dtype == torch.float32}
    of_layers = (f"decoder.layers.{n}.self_attention." for n in (0, 2))
    assert wide == {layer + name for layer in of_layers for name in ("A_log", "dt_bias")}


def _offline(**axes: int) -> ParallelGroups:
    return ParallelGroups.offline(ParallelLayout(**axes), 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(SIZES, kv_lora_rank=0), r"LatentSizes\.kv_lora_rank is 0. It must be at least 1"),
        (lambda: replace(SIZES, q_lora_rank=0), r"LatentSizes\.q_lora_rank is 0. It must be at least 1"),
        (lambda: replace(SIZES, v_head_dim=0), r"LatentSizes\.v_head_dim is 0. It must be at least 1"),
        (lambda: join_context([torch.zeros(3)] * 2, dim=0), r"Shares of 3 tokens.*multiple of 4"),
        (lambda: replace(MAMBA_SIZES, state_size=0), "state_size is 0"),
        (lambda: replace(MAMBA_SIZES, num_groups=3), "num_groups 3 does not divide num_heads 4"),
        (
            lambda: MambaMixer(8, MAMBA_SIZES, _offline(tp=8)),
            "num_heads 4 of Mamba is not a multiple of tp=8",
        ),
        (
            lambda: MambaMixer(8, MAMBA_SIZES, _offline(tp=3)),
            "num_groups 2 of Mamba is neither a multiple nor a divisor of tp=3",
        ),
        (
            lambda: MambaMixer(8, MAMBA_SIZES, _offline(tp=2, cp=4)),
            "num_heads 4 of Mamba is not a multiple of tp=2 x cp=4 = 8",
        ),
        (
            lambda: CONFIG.check_layout(ParallelLayout(tp=2, cp=4)),
            "num_value_heads 4 is not a multiple of tp=2 x cp=4 = 8",
        ),
        (lambda: CONFIG.check_layout(ParallelLayout(tp=4)), "num_key_heads 2 is not a multiple of tp=4"),
        (lambda: replace(CONFIG, delta_net=None), "delta_net is None. Give it exactly if"),
        (lambda: replace(CONFIG, layer_blocks=None), "Give it exactly if layer_blocks has a delta_net"),
        (
            lambda: replace(DELTA_SIZES, num_value_heads=3),
            "num_value_heads 3 is not a multiple of num_key_heads 2",
        ),
        (lambda: replace(DELTA_SIZES, key_head_dim=0), r"DeltaNetConfig.key_head_dim is 0"),
        (
            lambda: GatedDeltaNet(16, 2, 4, 4, 3, _offline(tp=2, cp=4)),
            r"2 value heads .* divided over cp=4. Choose .* tp x cp = 8",
        ),
        (
            lambda: GatedDeltaNet(16, 2, 4, 4, 3, _offline(tp=4)),
            "num_key_heads 2 cannot be cut into tp=4",
        ),
    ],
)
def test_sizes_that_make_no_mixer_are_an_error(make: Callable[[], object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        make()
