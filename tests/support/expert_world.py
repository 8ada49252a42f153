"""A small model with dense layers and experts for tests of optimizers, on any layout.

Tokens are routed by hand. A layer gathers the tokens of its etp x ep ranks, each rank computes its slices of
its experts for the tokens that belong to them, and the results are summed and cut into the tokens of each
rank again. That is a slow dispatch, but its gradients are those of any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megackpt.entities import ShardedStateDict
from megackpt.training.parallel import (
    LayerStack,
    ParallelGroups,
    ParallelLayout,
    ShardedModule,
    TpSharding,
    sharded_state_dict,
)
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.collectives import gather_sequence, reduce_from, reduce_scatter_sequence
from tests.support.optimizers import Arrays, random_arrays, scatter, tensors_of

EXPERTS, LAYERS, HIDDEN, FFN, OUT = 8, 4, 6, 8, 8
TOKENS = 32  # of the global batch


class Experts(ShardedModule):
    """SwiGLU experts, stacked, with a bias that is whole on every etp rank and used on the first only."""

    expert_axis = {"fc1": 0, "fc2": 0, "bias": 0}  # noqa: RUF012 - read-only by its type

    def __init__(self, groups: ParallelGroups) -> None:
        local, ffn = EXPERTS // groups.ep.size, FFN // groups.etp.size
        gate_and_up = TpSharding(dim=1, components={"gate": ffn, "up": ffn})
        super().__init__(groups, tp_sharding={"fc1": gate_and_up, "fc2": 2})
        self.fc1 = nn.Parameter(torch.zeros(local, 2 * ffn, HIDDEN))
        self.fc2 = nn.Parameter(torch.zeros(local, HIDDEN, ffn))
        self.bias = nn.Parameter(torch.zeros(local, HIDDEN))
        mark(self.bias, "sequence_parallel")

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        """Apply the experts to this rank's tokens `[n, hidden]`; expert_of `[n]` has their numbers."""
        ep, etp = self.groups.ep, self.groups.etp
        x = gather_sequence(gather_sequence(x, etp), ep)
        expert_of = gather_sequence(gather_sequence(expert_of, etp), ep)
        y = 0 * x  # in the graph also where no token has come, since others wait in the backward pass
        for local in range(len(self.fc1)):
            chosen = expert_of == ep.rank * len(self.fc1) + local
            if not bool(chosen.any()):
                continue
            gate, up = (x[chosen] @ self.fc1[local].T).chunk(2, -1)
            out = (torch.tanh(gate) * up) @ self.fc2[local].T
            y = y.index_add(0, chosen.nonzero()[:, 0], out + self.bias[local] if etp.is_first else out)
        return reduce_scatter_sequence(reduce_scatter_sequence(y, ep), etp)


class Layer(ShardedModule):
    """A norm-like weight that tp replicates, and experts after it."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        mark(self.norm, "sequence_parallel")
        self.experts = Experts(groups)

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        return x + self.experts(x * self.norm, expert_of)


class Head(ShardedModule):
    """A weight that tp cuts."""

    tp_sharding = {"weight": 0}  # noqa: RUF012 - read-only by its type

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.weight = nn.Parameter(torch.zeros(OUT // groups.tp.size, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        tp = self.groups.tp
        return reduce_from(torch.tanh(gather_sequence(x, tp) @ self.weight.T).sum(), tp)


class TinyMoE(ShardedModule):
    """The layers of this stage, in `vpp` chunks, and the head on the last stage."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        vpp, pp = groups.layout.vpp, groups.pp
        size = LAYERS // (pp.size * vpp)
        starts = [(chunk * pp.size + pp.rank) * size for chunk in range(vpp)]
        self.chunks = nn.ModuleList(
            LayerStack(lambda _: Layer(groups), range(start, start + size), LAYERS, groups)
            for start in starts
        )
        if pp.is_last:
            self.head = Head(groups)

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        """Return the mean over the tokens of this dp x cp rank, of which x are the share of this tp rank."""
        tokens = len(x) * self.groups.tp.size
        for chunk in self.chunks:
            for layer in chunk:
                x = layer(x, expert_of)
        loss: Tensor = self.head(x) / tokens
        return loss

    def sharded_state_dict(self, prefix: str = "", *args: Any) -> ShardedStateDict:
        chunks = [sharded_state_dict(chunk, self.groups, "layers.") for chunk in self.chunks]
        head = self.head.sharded_state_dict("head.") if self.groups.pp.is_last else {}
        return {"chunks": chunks, "head": head}


def build(groups: ParallelGroups, weights: Arrays, dtype: torch.dtype = torch.float32) -> TinyMoE:
    """Return this rank's part of the model with these global weights."""
    model = TinyMoE(groups)
    scatter(model.sharded_state_dict(), weights)
    return model.to(dtype)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the global shape of each array of the model, by key."""
    state = TinyMoE(ParallelGroups.offline(ParallelLayout(), 0)).sharded_state_dict()
    return {tensor.key: tensor.global_shape for tensor in tensors_of(state)}


def random_weights(seed: int) -> Arrays:
    return random_arrays(shapes(), seed)


def tokens_of(groups: ParallelGroups, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens of a step, and the numbers of their experts; some experts get none."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    expert_of = torch.randint(0, EXPERTS - 1, (TOKENS,), generator=generator)
    for axis in (groups.dp_cp, groups.tp):
        x, expert_of = (t.chunk(axis.size)[axis.rank] for t in (x, expert_of))
    return x, expert_of
