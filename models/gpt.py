"""One model chunk of a GPT: all of it, one pipeline stage, or one virtual stage of a pipeline stage.

A `StageTable` decides which layers are in which chunk. The first one has the embedding, the last one the
final norm and the logits. With tied embeddings over several stages, the last one has a second copy of the
embedding; with layers for further tokens, which are in the last chunk, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    LayerStack,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    ShardedModule,
    StageTable,
)
from megackpt.training.parallel.mtp import mean_over_tokens_ahead, tokens_ahead
from models.blocks.embedding import Embedding
from models.blocks.norm import block_norm
from models.blocks.transformer import MultiTokenPrediction, TransformerLayer
from models.config import GPTConfig
from models.language_model import LanguageModel
from models.stage import Stage


class Decoder(ShardedModule):
    """The layers of this chunk and, in the last chunk, the final norm. `[s (/tp), b, hidden]` to the same.

    Args:
        stage: what its parts are made with.
        owned: global indices of this chunk's layers.
        is_last: whether this is the last chunk of the model.
    """

    def __init__(self, stage: Stage, owned: Sequence[int], *, is_last: bool) -> None:
        super().__init__(stage.groups)

        def build(index: int) -> TransformerLayer:
            return TransformerLayer(stage, index)

        config = stage.config
        equal = len(set(config.blocks)) == 1
        self.layers = LayerStack(build, owned, config.num_layers, stage.groups, homogeneous=equal)
        self.final_layernorm = block_norm(stage) if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next stage, or the output layer, takes."""
        x = self.layers(x)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class GPT(LanguageModel):
    """One rank's chunk of a decoder-only transformer. Collective over tp; see `forward_backward` for pp.

    Each stage has one chunk, or several with virtual pipeline parallelism; `build_gpt` makes all of them.

    Initial weights are those of the layers, which differ by layout; `init_weights` makes them equal.

    Args:
        config: sizes and choices.
        groups: the ranks around this one; they decide which stage this is.
        rng: random streams for dropout; may be None where config.dropout is 0.
        sequence_parallel: between the layers each rank of tp holds its part of the sequence only; tp must
            divide the sequence length then.
        stages: which layers are in which chunk; None splits them evenly.
        virtual_stage: which chunk of this pipeline stage it is, in `[0, vpp)`.
        device: where the parameters lie.

    Raises:
        DeclarationError: the layout cannot hold the model, or there is dropout without rng.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ParallelGroups,
        rng: ParallelRng | None = None,
        *,
        sequence_parallel: bool = False,
        stages: StageTable | None = None,
        virtual_stage: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if type(config) is not GPTConfig:
            raise DeclarationError(
                f"a {type(config).__name__} does not describe a GPT. Give a GPTConfig, or build the model "
                f"that it describes."
            )
        table = _stage_table(config, groups.layout, stages)
        stage = Stage(
            config=config, groups=groups, rng=rng, sequence_parallel=sequence_parallel, device=device
        )
        is_first = table.has_embedding(groups.pp.rank, virtual_stage)
        is_last = table.has_loss(groups.pp.rank, virtual_stage)
        further = table.mtp_layers_of(groups.pp.rank, virtual_stage)
        super().__init__(stage, Embedding(stage) if is_first or further else None, is_first=is_first)
        self.decoder = Decoder(stage, table.layers_of(groups.pp.rank, virtual_stage), is_last=is_last)
        self.add_output_layer(stage, is_last=is_last)
        self.mtp = MultiTokenPrediction(stage, further) if further else None

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
        """Run this chunk.

        With context parallelism, tokens and labels are this rank's share, as `context_share` cuts them: s
        counts the tokens of this rank, and the loss is the mean over them. The loss of the batch is the mean
        over `groups.dp_cp`.

        Args:
            inputs: token ids `[b, s]` for the first chunk, hidden states `[s (/tp), b, hidden]` for others.
            labels: token ids `[b, s]`; looked at by the last chunk only.

        Returns:
            Hidden states `[s (/tp), b, hidden]`; of the last chunk the mean loss over the tokens (0-dim,
            float32) or, without labels, this rank's logits `[s, b, padded_vocab/tp]`. Where gradients are
            needed, the weighted loss of layers for further tokens is added.

        Raises:
            DeclarationError: in the first chunk, a sequence longer than the model is made for.
        """
        hidden = inputs
        if self.is_first and self.embedding is not None:
            self.check_length(inputs.shape[1])
            hidden = self.embedding(inputs)
        hidden = cast(Tensor, self.decoder(hidden))
        if self.output_layer is None:
            return hidden
        if labels is None:
            return self.logits(hidden)
        loss = self.losses(hidden, labels).mean()
        if self.training and torch.is_grad_enabled():
            loss = loss + self._loss_of_further_tokens(hidden, labels)
        return loss

    def _loss_of_further_tokens(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted mean of the losses of the layers for further tokens, 0-dim.

        A label is the next token: the layer with index k gets labels k later and predicts those k + 1 later.
        """
        total, cp = hidden.new_zeros((), dtype=torch.float32), self.groups.cp
        if self.mtp is None or self.embedding is None or self.config.mtp is None:
            return total
        for index, layer in enumerate(self.mtp.layers):
            hidden = layer(hidden, self.embedding(tokens_ahead(labels, index, cp)))
            losses = self.losses(hidden, tokens_ahead(labels, index + 1, cp))
            total = total + mean_over_tokens_ahead(losses, index + 1, cp)
        return total * (self.config.mtp.loss_weight / len(self.mtp.layers))


def build_gpt(
    config: GPTConfig,
    groups: ParallelGroups,
    rng: ParallelRng | None = None,
    *,
    sequence_parallel: bool = False,
    stages: StageTable | None = None,
    device: torch.device | str | None = None,
) -> ModelChunks:
    """Return all model chunks of this rank: `groups.layout.vpp` of them. Arguments and errors as for GPT."""
    table = _stage_table(config, groups.layout, stages)
    chunk = partial(
        GPT, config, groups, rng, sequence_parallel=sequence_parallel, stages=table, device=device
    )
    return ModelChunks([chunk(virtual_stage=number) for number in range(table.vpp)], groups)


def _stage_table(config: GPTConfig, layout: ParallelLayout, stages: StageTable | None) -> StageTable:
    config.check_layout(layout, stages)
    if stages is None:
        stages = StageTable.even(config.num_layers, pp=layout.pp, vpp=layout.vpp)
    count, last = 0 if config.mtp is None else config.mtp.num_layers, len(stages.layers) - 1
    if not stages.mtp_layers and count:
        return replace(stages, mtp_layers=count, mtp_position=last)
    if (stages.mtp_layers, stages.mtp_position) not in ((0, None), (count, last)):
        raise DeclarationError(
            f"the stage table {str(stages)!r} has {stages.mtp_layers} MTP layers at position "
            f"{stages.mtp_position}, but the model has {count}, in the last stage, with the loss. Put them "
            f"there, or leave them out of the table."
        )
    return stages
