"""Mamba-2 and gated delta nets: what they compute, what is stored at which layout, and what is an error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt import DeclarationError
from megackpt.parallel import (
    CausalConv1d,
    GatedDeltaNet,
    GatedGroupNorm,
    MambaMixer,
    MambaSizes,
    ParallelGroups,
    ParallelLayout,
    gated_delta_rule,
    selective_scan,
)
from models import AttentionConfig, DeltaNetConfig, build_gpt
from tests.support.gpt import SMALL_GPT, joined
from tests.support.optimizers import tensors_of

ONE = ParallelGroups.create(ParallelLayout())
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


def test_a_mixer_in_bfloat16_has_some_parameters_in_float32() -> None:
    mixer = MambaMixer(8, MAMBA_SIZES, ONE, dtype=torch.bfloat16)
    wide = {name for name, param in mixer.named_parameters() if param.dtype == torch.float32}
    assert wide == {"A_log", "D", "dt_bias"}
    out = mixer(random(7, 2, 8).bfloat16())
    assert (out.dtype, out.shape) == (torch.bfloat16, (7, 2, 8))
    out.sum().backward()
    assert all(param.grad is not None for param in mixer.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"state_size": 0}, "state_size is 0"), ({"num_groups": 3}, "num_groups 3 does not divide num_heads 4")],
)
def test_sizes_that_no_mixer_has_are_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        MambaSizes(**{"num_heads": 4, "head_dim": 3, "state_size": 5, **changes})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(tp=8), "num_heads 4 of Mamba is not a multiple of tp=8"),
        (ParallelLayout(tp=3), "num_groups 2 of Mamba is neither a multiple nor a divisor of tp=3"),
        (ParallelLayout(tp=2, cp=4), "num_heads 4 of Mamba is not a multiple of tp=2 x cp=4 = 8"),
    ],
)
def test_layouts_that_cannot_hold_a_mixer_are_an_error(layout: ParallelLayout, message: str) -> None:
    assert any(message in fault for fault in MAMBA_SIZES.faults(layout))
    with pytest.raises(DeclarationError, match=message):
        MambaMixer(8, MAMBA_SIZES, ParallelGroups.offline(layout, rank=0))


SIZES = DeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=4, value_head_dim=3)
CONFIG = replace(
    SMALL_GPT,
    linear_bias=False,
    attention=AttentionConfig(output_gate=True),
    delta_net=SIZES,
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
    conv = CausalConv1d({"x": 2, "y": 1}, 3, ParallelGroups.create(ParallelLayout()))
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
    model = build_gpt(replace(CONFIG, params_dtype=torch.bfloat16), ParallelGroups.create(ParallelLayout()))
    wide = {t.key for t in tensors_of(model.sharded_state_dict()) if t.dtype == torch.float32}
    of_layers = (f"decoder.layers.{n}.self_attention." for n in (0, 2))
    assert wide == {layer + name for layer in of_layers for name in ("A_log", "dt_bias")}


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, ParallelLayout(tp=2, cp=4), "num_value_heads 4 is not a multiple of tp=2 x cp=4 = 8"),
        ({}, ParallelLayout(tp=4), "num_key_heads 2 is not a multiple of tp=4"),
        ({"delta_net": None}, ParallelLayout(), "delta_net is None. Give it exactly if"),
        ({"layer_blocks": None}, ParallelLayout(), "Give it exactly if layer_blocks has a delta_net"),
    ],
)
def test_what_does_not_fit_is_an_error(changes: Any, layout: ParallelLayout, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        replace(CONFIG, **changes).check_layout(layout)


def test_a_mixer_that_cannot_be_cut_is_an_error() -> None:
    with pytest.raises(DeclarationError, match="num_value_heads 3 is not a multiple of num_key_heads 2"):
        replace(SIZES, num_value_heads=3)
    with pytest.raises(DeclarationError, match=r"DeltaNetConfig.key_head_dim is 0"):
        replace(SIZES, key_head_dim=0)
    groups = ParallelGroups.offline(ParallelLayout(tp=2, cp=4), 0)
    with pytest.raises(DeclarationError, match=r"2 value heads .* divided over cp=4. Choose .* tp x cp = 8"):
        GatedDeltaNet(16, 2, 4, 4, 3, groups)
    with pytest.raises(DeclarationError, match="num_key_heads 2 cannot be cut into tp=4"):
        GatedDeltaNet(16, 2, 4, 4, 3, ParallelGroups.offline(ParallelLayout(tp=4), 0))
