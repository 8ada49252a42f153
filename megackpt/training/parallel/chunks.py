"""The model chunks of one pipeline stage, as one module with one state dict.

With virtual pipeline parallelism a stage has several chunks, which are not neighbours in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule, sharded_state_dict


class ModelChunks(ShardedModule):
    """The chunks of this stage, one for each virtual stage, in the order that a micro-batch visits them.

    `forward_backward` and `forward_only` run them; the container has no forward of its own. Names in the
    state dict begin with the number of the chunk (`0.decoder...`). Keys in the checkpoint are those of the
    chunks themselves, so that a checkpoint does not depend on which chunk has a layer.

    Args:
        chunks: modules that declare global keys: see `StageTable` for the layers of each.
        groups: the ranks around this one.
    """

    def __init__(self, chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
        super().__init__(groups)
        for number, chunk in enumerate(chunks):
            self.add_module(str(number), chunk)

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the chunks, in order."""
        return self.children()

    def __getitem__(self, index: int) -> nn.Module:
        """Return the chunk of a virtual stage."""
        return list(self)[index]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare the chunks of this stage. Local."""
        result: ShardedStateDict = {}
        for number, chunk in self.named_children():
            entities = sharded_state_dict(chunk, self.groups, prefix, sharded_offsets, metadata)
            result |= {f"{prefix}{number}.{name[len(prefix) :]}": e for name, e in entities.items()}
        return result
