"""The vocabulary cut over tp: token embedding, output logits, and cross entropy over logits that stay cut.

The number of rows is rounded up to a multiple of tp, so it depends on tp. The padding rows are zero and stay
zero: they are never looked up, and their logits are not part of the loss. So the padding in a checkpoint may
differ from that of the model (`allow_shape_mismatch`). The number of tokens is stored with the arrays
(`unpadded_extent`), so that the rows of new tokens keep the values that the model was initialised with.

Source: Shoeybi et al. 2019, section 3 (parallel embedding and cross entropy); `make_divisible` is
Megatron-LM's `--make-vocab-size-divisible-by`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import (
    all_reduce,
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
)
from megackpt.training.parallel.groups import Axis, ParallelGroups
from megackpt.training.parallel.linear import INIT_STD
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.tp_sharding import TpSharding


def _cut_vocabulary(vocab_size: int) -> TpSharding:
    return TpSharding(dim=0, allow_shape_mismatch=True, unpadded_extent=vocab_size)


def padded_vocab_size(vocab_size: int, *, tp: int, make_divisible: int = 128) -> int:
    """Return the smallest multiple of `tp * make_divisible` that is at least `vocab_size`. Pure.

    >>> padded_vocab_size(50257, tp=8)
    51200
    """
    multiple = tp * make_divisible
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(ShardedModule):
    """Token ids to vectors; weight `[padded_vocab/tp, hidden]`, this rank's rows. Collective over tp.

    Args:
        vocab_size: number of token ids, without padding.
        hidden_size: extent of a vector.
        groups: the ranks around this one.
        make_divisible: rows per rank are a multiple of this.
        sequence_parallel: cut the output along dim 0, which then has to be the sequence.
        dtype: dtype of the weight.
        device: where the weight is.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        make_divisible: int = 128,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups, tp_sharding={"weight": _cut_vocabulary(vocab_size)})
        self.vocab_size = vocab_size
        self.sequence_parallel = sequence_parallel
        self.weight = _vocabulary_weight(vocab_size, hidden_size, groups.tp, make_divisible, dtype, device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors `[..., hidden]` of ids `[...]`; with sequence_parallel only `s/tp` of dim 0.

        Raises:
            DeclarationError: an id outside of the vocabulary (looked for on the CPU only; elsewhere it would
                stall the device, and such an id gives a zero vector).
        """
        _check_ids(tokens, self.vocab_size, "token")
        tp, rows = self.groups.tp, self.weight.shape[0]
        local, elsewhere = _local_ids(tokens, rows, tp)
        vectors = F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_scatter_sequence(vectors, tp) if self.sequence_parallel else reduce_from(vectors, tp)


class VocabParallelOutput(ShardedModule):
    """Hidden states to logits over this rank's rows of the vocabulary. Collective over tp.

    With `tied=True` it has no weight of its own; each call passes that of the embedding. A bias, of
    `[padded_vocab/tp]`, is its own in any case.

    Args:
        vocab_size: number of token ids, without padding.
        hidden_size: extent of the last dim of the input.
        groups: the ranks around this one.
        tied: use the weight that is passed to `forward`.
        bias: whether there is a bias.
        make_divisible: rows per rank are a multiple of this; that of the embedding.
        sequence_parallel: the input is cut along the sequence, dim 0.
        dtype: dtype of the weight.
        device: where the weight is.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        groups: ParallelGroups,
        *,
        tied: bool = False,
        bias: bool = False,
        make_divisible: int = 128,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        cut = _cut_vocabulary(vocab_size)
        super().__init__(groups, tp_sharding={"weight": cut, "bias": cut})
        self.sequence_parallel = sequence_parallel
        self.weight = (
            None
            if tied
            else _vocabulary_weight(vocab_size, hidden_size, groups.tp, make_divisible, dtype, device)
        )
        rows = padded_vocab_size(vocab_size, tp=groups.tp.size, make_divisible=make_divisible)
        self.bias = (
            nn.Parameter(torch.zeros(rows // groups.tp.size, dtype=dtype, device=device)) if bias else None
        )

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return logits `[s, ..., padded_vocab/tp]` of hidden states `[s (/tp), ..., hidden]`.

        weight is that of the embedding, `[padded_vocab/tp, hidden]`; a tied layer needs it.

        Raises:
            DeclarationError: the layer is tied, and no weight is given.
        """
        used = self.weight if weight is None else weight
        if used is None:
            raise DeclarationError(
                "a tied VocabParallelOutput has no weight. Call it with that of the embedding."
            )
        tp = self.groups.tp
        x = gather_sequence(x, tp) if self.sequence_parallel else copy_to(x, tp)
        return F.linear(x, used, self.bias)


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, axis: Axis, *, vocab_size: int) -> Tensor:
    """Return the cross entropy of each label, float32, shape of `labels`. Collective over the axis.

    The logits are never joined: two numbers per label are exchanged instead.

    Args:
        logits: `[..., padded_vocab/size]`, this rank's slice.
        labels: token ids `[...]`, equal on all ranks of the axis.
        axis: the ranks with the other slices.
        vocab_size: number of token ids, without padding; logits from there on are not part of the loss.

    Raises:
        DeclarationError: a label outside of the vocabulary (looked for on the CPU only).
    """
    _check_ids(labels, vocab_size, "label")
    width = logits.shape[-1]
    ids = torch.arange(axis.rank * width, (axis.rank + 1) * width, device=logits.device)
    wide = logits.float().masked_fill(ids >= vocab_size, float("-inf"))
    # A shift by any constant does not change the result; after a shift by the maximum nothing overflows.
    shifted = wide - all_reduce(wide.detach().amax(dim=-1), axis, dist.ReduceOp.MAX).unsqueeze(-1)
    local, elsewhere = _local_ids(labels, width, axis)
    own = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
    both = reduce_from(torch.stack([shifted.exp().sum(dim=-1), own]), axis)  # one all-reduce for both
    return both[0].log() - both[1]


def _vocabulary_weight(
    vocab_size: int,
    hidden_size: int,
    axis: Axis,
    make_divisible: int,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> nn.Parameter:
    rows = padded_vocab_size(vocab_size, tp=axis.size, make_divisible=make_divisible) // axis.size
    weight = torch.empty(rows, hidden_size, dtype=dtype, device=device).normal_(std=INIT_STD)
    weight[max(0, min(rows, vocab_size - axis.rank * rows)) :] = 0.0
    return nn.Parameter(weight)


def _local_ids(ids: Tensor, rows: int, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return each id's row on this rank (row 0 for an id that is elsewhere), and which ones are elsewhere."""
    local = ids - axis.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


def _check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    if ids.device.type != "cpu" or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise DeclarationError(
            f"{what} ids range from {low} to {high}, but the vocabulary has ids 0 to {vocab_size - 1}. Use "
            f"the tokenizer that vocab_size belongs to."
        )
