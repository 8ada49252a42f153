"""Experts that are modules of their own, one per expert.

In the checkpoint every tensor of an expert has a leading axis over all experts of the layer, as `LayerStack`
adds one over all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.experts import divide_over_ep
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule, sharded_state_dict


class ExpertStack(ShardedModule):
    """The experts of a layer on this rank. As collective as an expert is, over etp.

    An expert is any module from `[rows, hidden]` to `[rows, hidden]`. If etp is larger than 1, all ranks of
    etp call it with the same rows and expect the same output: layers made with `groups.experts` do so, a
    column layer followed by a row layer for instance. Names in the state dict count the experts of this rank
    (`0.weight`); the checkpoint has one key for each tensor (`weight`), with a leading axis over all experts.

        ExpertStack(lambda index: Expert(hidden, ffn, groups.experts), 64, groups)

    Args:
        build: returns the expert with a global index. All experts have the same structure.
        num_experts: number of experts on all ranks.
        groups: the ranks around this one.

    Raises:
        DeclarationError: ep does not divide the experts; an expert has a layer that was made with `groups`
            instead of `groups.experts`.

    Source: Megatron-Core `moe.experts.SequentialMLP`.
    """

    output_is_partial = False

    def __init__(self, build: Callable[[int], nn.Module], num_experts: int, groups: ParallelGroups) -> None:
        super().__init__(groups)
        local = divide_over_ep(num_experts, groups)
        self.num_experts = num_experts
        self.owned = range(groups.ep.rank * local, (groups.ep.rank + 1) * local)
        for position, index in enumerate(self.owned):
            expert = build(index)
            _check_groups(expert, index)
            for param in expert.parameters():
                mark(param, "expert_parallel")
            self.add_module(str(position), expert)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the outputs of `rows`, which are ordered by local expert: `counts[e]` rows of expert e."""
        parts = torch.split_with_sizes(rows, list(counts))
        # An expert without rows is called, too: its gradients are to be 0 and not missing, and its layers
        # may communicate.
        return torch.cat([expert(part) for expert, part in zip(self.children(), parts, strict=True)])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare this rank's experts, stacked along an axis after `sharded_offsets`. Local."""
        result: ShardedStateDict = {}
        axis = len(sharded_offsets)
        for (position, expert), index in zip(self.named_children(), self.owned, strict=True):
            stacked = (*sharded_offsets, (axis, index, self.num_experts))
            entities = sharded_state_dict(expert, self.groups.experts, prefix, stacked, metadata)
            result |= {f"{prefix}{position}.{name[len(prefix) :]}": e for name, e in entities.items()}
        return result


def _check_groups(expert: nn.Module, index: int) -> None:
    for name, module in expert.named_modules():
        if isinstance(module, ShardedModule) and not module.groups.for_experts:
            raise DeclarationError(
                f"expert {index}: {name or 'it'} ({type(module).__name__}) was made with the groups of dense "
                f"layers, so that it would be cut over tp and not over etp. Make it with groups.experts."
            )
