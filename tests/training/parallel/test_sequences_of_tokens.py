"""The router gets which sequence each token is of, whichever part of the tokens a rank of tp routes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megackpt.parallel import (
    GatedExperts,
    MixtureOfExperts,
    ParallelGroups,
    ParallelLayout,
    Router,
    RoutingOptions,
)

LENGTH, BATCH, HIDDEN, TP = 6, 4, 7, 4


class RouterCalled(Exception):
    """Carries what the router has got."""


def sequences_on(rank: int, *, sequence_parallel: bool) -> list[tuple[int, int]]:
    """Return, on a rank of tp, the sequence that each token is of and the one that the router gets."""
    groups = ParallelGroups.offline(ParallelLayout(tp=TP), rank)
    router = Router(HIDDEN, 4, groups, RoutingOptions(top_k=2))
    layer = MixtureOfExperts(
        router, GatedExperts(4, HIDDEN, 8, groups), groups, sequence_parallel=sequence_parallel
    )

    def report(_: nn.Module, arguments: tuple[Tensor, Tensor, int]) -> None:
        tokens, sequences, count = arguments
        assert count == BATCH
        raise RouterCalled(list(zip(tokens[:, 0].int().tolist(), sequences.tolist(), strict=True)))

    router.register_forward_pre_hook(report)
    # Each token says of which sequence it is.
    x = torch.arange(BATCH).view(1, BATCH, 1).expand(LENGTH, BATCH, HIDDEN).float()
    with pytest.raises(RouterCalled) as raised:
        layer(x)
    pairs: list[tuple[int, int]] = raised.value.args[0]
    return pairs


@pytest.mark.parametrize("rank", range(TP))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_router_gets_the_sequence_of_every_token(rank: int, sequence_parallel: bool) -> None:
    pairs = sequences_on(rank, sequence_parallel=sequence_parallel)
    assert len(pairs) == LENGTH * BATCH // (1 if sequence_parallel else TP)
    assert all(own == received for own, received in pairs)
