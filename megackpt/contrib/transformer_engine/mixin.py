"""A base class for those who derive from Transformer Engine's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from megackpt.contrib.transformer_engine.declare import declare_module_of_te
from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.training.parallel import ParallelGroups
from megackpt.training.parallel.foreign_modules import Metadata


class TransformerEngineMixin(nn.Module):
    """Adds `sharded_state_dict` to a class of Transformer Engine. Put it before that class.

        class Projection(TransformerEngineMixin, te.Linear):
            pass

        Projection(groups, 16, 32, parallel_mode="column", tp_size=groups.tp.size)

    Attributes:
        groups: the ranks around this one.
    """

    groups: ParallelGroups

    def __init__(self, groups: ParallelGroups, *args: Any, **kwargs: Any) -> None:
        self.groups = groups
        super().__init__(*args, **kwargs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare what this rank has of this module and its children; see `declare_module_of_te`. Local."""
        return declare_module_of_te(self, self.groups, prefix, sharded_offsets, metadata)
