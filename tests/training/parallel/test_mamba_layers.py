"""Layers of Mamba-2: the scan, the norm over groups, and which parameters a mixer has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt import DeclarationError
from megackpt.parallel import (
    GatedGroupNorm,
    MambaMixer,
    MambaSizes,
    ParallelGroups,
    ParallelLayout,
    selective_scan,
)

ONE = ParallelGroups.create(ParallelLayout())
SIZES = MambaSizes(num_heads=4, head_dim=3, state_size=5, num_groups=2)


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
    mixer = MambaMixer(8, SIZES, ONE, dtype=torch.bfloat16)
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
    assert any(message in fault for fault in SIZES.faults(layout))
    with pytest.raises(DeclarationError, match=message):
        MambaMixer(8, SIZES, ParallelGroups.offline(layout, rank=0))
