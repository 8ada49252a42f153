"""Attention of the parts of a sequence on a GPU, in the dtypes of training; streams on the device."""

from __future__ import annotations

import pytest
import torch

from megackpt.parallel import (
    AttentionPart,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    causal_attention,
    context_positions,
    dropout,
)
from megackpt.parallel.context import _attend

pytestmark = pytest.mark.gpu

ONE = ParallelGroups.create(ParallelLayout())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_late_queries_attend_to_what_they_do_in_the_whole_sequence(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, 64, 32, generator=generator, device="cuda", dtype=dtype) for heads in (8, 2, 2)
    )
    whole = causal_attention(q, k, v, ONE.cp)
    out = _attend(AttentionPart(q[:, :, 16:32], k[:, :, :32], v[:, :, :32]))
    # Other kernels sum in another order: rounding errors of fp32, and of bf16 two of its steps at 1.
    torch.testing.assert_close(out, whole[:, :, 16:32], rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_positions_and_streams_are_on_the_device() -> None:
    cp = ParallelGroups.offline(ParallelLayout(cp=2), 1).cp
    positions = context_positions(8, cp, device="cuda")
    assert (positions.device.type, positions.tolist()) == ("cuda", [2, 3, 4, 5])
    rng = ParallelRng(1, ONE, device="cuda")
    state = rng.state_dict()
    expected = [dropout(torch.ones(9, device="cuda"), 0.5, rng.generator(s)) for s in ("distinct", "expert")]
    rng.reseed(3)
    rng.load_state_dict(state)
    actual = [dropout(torch.ones(9, device="cuda"), 0.5, rng.generator(s)) for s in ("distinct", "expert")]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
