"""What the chunks of all models have: an embedding at the beginning, and logits and losses at the end.

With tied embeddings over several stages, the last one has a second copy of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.errors import DeclarationError
from megackpt.training.parallel import (
    ParallelGroups,
    ParallelRng,
    ShardedModule,
    StageTable,
    VocabParallelOutput,
    divide_over_tp,
    vocab_parallel_cross_entropy,
)
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.foreign_modules import Metadata
from megackpt.training.parallel.mixin import second_copy
from models.blocks.embedding import Embedding
from models.encoder_config import EncoderConfig
from models.stage import Stage

EMBEDDING_KEY = "embedding.word_embeddings.weight"
OUTPUT_KEY = "output_layer.weight"


class LanguageModel(ShardedModule):
    """One rank's chunk of a model of tokens, without the layers between its two ends.

    Subclasses add their layers, call `add_output_layer` after that, and have a `forward`.

    Args:
        stage: what its parts are made with.
        embedding: of the first chunk, and of others that look tokens up; None for chunks that do not.
        is_first: whether this is the first chunk of the model.
    """

    output_layer: VocabParallelOutput | None

    def __init__(self, stage: Stage, embedding: Embedding | None, *, is_first: bool) -> None:
        super().__init__(stage.groups)
        self.config = stage.config
        self.sequence_parallel = stage.sequence_parallel
        self.is_first = is_first
        self.embedding = embedding

    def add_output_layer(self, stage: Stage, *, is_last: bool, bias: bool = False) -> None:
        """Add the output layer if this is the last chunk, and mark the copies of one weight. Local."""
        config = stage.config
        self.output_layer = (
            VocabParallelOutput(
                config.vocab_size,
                config.hidden_size,
                stage.groups,
                tied=config.tied_embeddings and self.embedding is not None,
                bias=bias,
                make_divisible=config.make_vocab_divisible,
                sequence_parallel=stage.sequence_parallel,
                dtype=config.params_dtype,
                device=stage.device,
            )
            if is_last
            else None
        )
        if self._has_two_copies:
            self._mark_copies()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's logits `[s, b, padded_vocab/tp]`. Of the last chunk; collective over tp."""
        assert self.output_layer is not None
        logits = cast(Tensor, self.output_layer(hidden, self._tied_weight()))
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each label `[b, s]`, as `[s, b]`. Of the last chunk; collective over tp."""
        return vocab_parallel_cross_entropy(
            self.logits(hidden),
            labels.transpose(0, 1),
            self.groups.tp,
            vocab_size=self.config.vocab_size,
        )

    def mean_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss over the labels `[b, s]` that are not negative, 0-dim.

        Of the last chunk; collective over tp and cp. Each rank of dp has the mean over its own ones. Ranks of
        cp, which may have different numbers of them, have losses whose mean is that over the labels of all.
        """
        losses, counted = self.losses(hidden, labels.clamp(min=0)), (labels >= 0).transpose(0, 1)
        cp = self.groups.cp
        return (losses * counted).sum() / (all_reduce(counted.sum(), cp).clamp(min=1) / cp.size)

    def extra_shapes(self, batch: int) -> Sequence[Shape | None]:
        """Return the shapes of what a chunk hands to the next besides hidden states. Pure."""
        return ()

    def activation_buffer(self, tokens: Tensor) -> Tensor:
        """Return an empty tensor for what the previous chunk makes of `tokens` `[b, s]`.

        Its shape is `[s (/tp) + rows, b, hidden]`: the rows are those that tensors of `extra_shapes` need.
        """
        batch, sequence = tokens.shape
        if self.sequence_parallel:
            sequence = divide_over_tp("sequence length", sequence, self.groups)
        hidden = self.config.hidden_size
        rows = row_count(self.extra_shapes(batch), batch=batch, hidden=hidden)
        shape = (sequence + rows, batch, hidden)
        return torch.empty(shape, dtype=self.config.params_dtype, device=tokens.device)

    def check_length(self, own: int) -> None:
        """Check that sequences are not too long, where this rank of cp has `own` of their tokens. Pure.

        Raises:
            DeclarationError: they are longer than the model is made for.
        """
        cp, allowed = self.groups.cp.size, self.config.seq_length
        if own * cp > allowed:
            shares = f" ({own} on each of {cp} ranks of cp)" if cp > 1 else ""
            hint = ", give each rank of cp its context_share" if cp > 1 else ""
            raise DeclarationError(
                f"the sequences have {own * cp} tokens{shares}, but {type(self.config).__name__}.seq_length "
                f"is {allowed}. Cut them{hint}, or make the model for longer ones."
            )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[RankOffset] = (), metadata: Metadata = None
    ) -> ShardedStateDict:
        """Declare this chunk; the last one may have a second copy of the embedding. Local."""
        result = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._has_two_copies and self.output_layer is not None:
            copy = prefix + (OUTPUT_KEY if self.embedding is None else EMBEDDING_KEY)
            result[copy] = second_copy(result[copy], prefix + EMBEDDING_KEY)
        return result

    def _tied_weight(self) -> Tensor | None:
        """The embedding, where the output layer has no weight of its own: tied, with one in this chunk."""
        return (
            self.embedding.word_embeddings.weight
            if self.embedding is not None and self.config.tied_embeddings
            else None
        )

    @property
    def _has_two_copies(self) -> bool:
        is_used_twice = self.config.tied_embeddings or self.config.mtp is not None
        return is_used_twice and self.groups.pp.size > 1

    def _mark_copies(self) -> None:
        """Tell the optimizer that first and last stage hold one weight twice."""
        if self.embedding is not None:
            weight = self.embedding.word_embeddings.weight
        elif self.output_layer is not None and self.output_layer.weight is not None:
            weight = self.output_layer.weight
        else:
            return
        mark(weight, "shared_embedding", *(() if self.is_first else ("is_duplicate",)))


# Packs small tensors into further rows of the hidden states, for the next chunk of a pipeline.
#
# Later stages receive no tokens, only one tensor of activations. A mask of padding, for instance, therefore
# travels in further rows of that tensor.

Shape = tuple[int, ...]


def row_count(shapes: Sequence[Shape | None], *, batch: int, hidden: int) -> int:
    """Return how many rows `[batch, hidden]` tensors of these shapes need; None for an absent one. Pure."""
    return -(-sum(_sizes(shapes)) // (batch * hidden))


def with_rows(hidden: Tensor, extras: Sequence[Tensor | None]) -> Tensor:
    """Return hidden states `[s, b, hidden]`, then rows with the elements of `extras` and zeros. Pure."""
    batch, width = hidden.shape[1:]
    rows = row_count([None if x is None else x.shape for x in extras], batch=batch, hidden=width)
    if rows == 0:
        return hidden
    elements = torch.cat([x.flatten() for x in extras if x is not None])
    filled = F.pad(elements, (0, rows * batch * width - len(elements)))
    return torch.cat([hidden, filled.view(rows, batch, width)])


def without_rows(inputs: Tensor, shapes: Sequence[Shape | None]) -> tuple[Tensor, list[Tensor | None]]:
    """Return the hidden states, and the extras of these shapes, that `with_rows` has joined. Pure."""
    batch, width = inputs.shape[1:]
    rows, sizes = row_count(shapes, batch=batch, hidden=width), _sizes(shapes)
    hidden, packed = inputs.tensor_split([len(inputs) - rows])
    parts = packed.flatten()[: sum(sizes)].split_with_sizes(sizes)
    return hidden, [
        None if shape is None else part.view(shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def _sizes(shapes: Sequence[Shape | None]) -> list[int]:
    return [0 if shape is None else math.prod(shape) for shape in shapes]


# What the chunks of models with an encoder share: the stage that one is built for, and what is in it.

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
