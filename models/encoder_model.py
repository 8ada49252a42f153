"""What the chunks of models with an encoder share: the stage that one is built for, and what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from megackpt.training.parallel import ParallelGroups, ParallelRng, StageTable
from models.blocks.embedding import Embedding
from models.encoder_config import EncoderConfig
from models.language_model import LanguageModel
from models.stage import Stage

Config = TypeVar("Config", bound=EncoderConfig)


class EncoderModel(LanguageModel, Generic[Config]):
    """One rank's chunk of a model with an encoder. Collective over tp and cp; see `forward_backward` for pp.

    Subclasses have `add_layers` and a `forward`.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the tokens only, those of a T5
            cut in its encoder and in its decoder; tp must divide their numbers then.
        stages: which layers are in which chunk; None splits them evenly.
        virtual_stage: which chunk of this pipeline stage it is, in `[0, vpp)`.
        device: where the parameters lie.

    Attributes:
        is_last: whether this is the last chunk of the model.

    Raises:
        DeclarationError: the layout cannot hold the model, or there is dropout without rng.
    """

    config: Config
    embedding_type: type[Embedding] = Embedding

    def __init__(
        self,
        config: Config,
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
        *,
        sequence_parallel: bool = False,
        stages: StageTable | None = None,
        virtual_stage: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        config.check_layout(groups.layout, stages)
        layout, position = groups.layout, (groups.pp.rank, virtual_stage)
        table = stages or StageTable.even(config.num_layers, pp=layout.pp, vpp=layout.vpp)
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        is_first = table.has_embedding(*position)
        super().__init__(stage, self.embedding_type(stage) if is_first else None, is_first=is_first)
        self.is_last = table.has_loss(*position)
        self.add_layers(stage, table.layers_of(*position))

    def add_layers(self, stage: Stage, owned: Sequence[int]) -> None:
        """Add the layers with these global indices, and the output layer if this is the last chunk. Local."""
        raise NotImplementedError
