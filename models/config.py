"""What a GPT is, independent of how many ranks it runs on.

Sizes and choices, and the check that a parallel layout is possible with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megackpt.errors import DeclarationError
from megackpt.parallel import ParallelLayout, StageTable
from models.moe_config import MoEConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes and choices of a decoder-only transformer with rotary positions and gated MLPs.

    Attributes:
        vocab_size: number of token ids, without padding.
        hidden_size: extent of a hidden state.
        num_layers: transformer layers over all pipeline stages.
        num_heads: query heads; they divide hidden_size.
        num_query_groups: key and value heads (grouped-query attention); None gives one per query head.
        ffn_hidden_size: extent inside the gated MLP; None gives about 8/3 of hidden_size, in steps of 64.
        seq_length: longest sequence.
        dropout: probability, for attention weights and for the output of each block.
        tied_embeddings: use the embedding as the output weight too.
        linear_bias: whether the linear layers of the blocks have biases.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.
        init_std: standard deviation of the initial weights.
        make_vocab_divisible: rows of the vocabulary per tp rank are a multiple of this.
        params_dtype: dtype of parameters and activations.
        moe: the mixture of experts that layers have instead of the MLP; None if all layers are dense.

    Raises:
        DeclarationError: a size below 1, heads that do not divide, a probability outside of [0, 1), or a
            sequence of layers with experts that has another length than num_layers.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    seq_length: int = 1024
    dropout: float = 0.0
    tied_embeddings: bool = True
    linear_bias: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    make_vocab_divisible: int = 128
    params_dtype: torch.dtype = torch.float32
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"GPTConfig.{name} is {getattr(self, name)}. It must be at least 1.")
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise DeclarationError(
                f"GPTConfig.hidden_size {self.hidden_size} cannot be cut into num_heads {self.num_heads} "
                "heads of even size, which rotary positions need. Choose hidden_size as a multiple of "
                f"{2 * self.num_heads}."
            )
        if self.query_groups < 1 or self.num_heads % self.query_groups:
            raise DeclarationError(
                f"GPTConfig.num_query_groups {self.query_groups} does not divide num_heads {self.num_heads}. "
                f"Choose a divisor."
            )
        if self.ffn_size < 1:
            raise DeclarationError(f"GPTConfig.ffn_hidden_size is {self.ffn_size}. It must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise DeclarationError(f"GPTConfig.dropout is {self.dropout}. It must be in [0, 1).")
        if len(self.moe_layers) != self.num_layers:
            raise DeclarationError(
                f"GPTConfig.moe has a layer_freq of {len(self.moe_layers)} layers, but num_layers is "
                f"{self.num_layers}. Give one number for each layer."
            )

    @property
    def head_dim(self) -> int:
        """Extent of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def ffn_size(self) -> int:
        """Extent inside the gated MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64  # three matrices as large as the usual two of 4 h

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has a mixture of experts."""
        return (False,) * self.num_layers if self.moe is None else self.moe.pattern(self.num_layers)

    def check_layout(self, layout: ParallelLayout, stages: StageTable | None = None) -> None:
        """Check that `layout`, with a table of its stages or an even one, can hold this model. Pure.

        Raises:
            DeclarationError: tp does not divide the heads or MLP, neither of tp and the query groups divides
                the other, sequences cannot be cut into two parts for each rank of cp, ep does not divide the
                experts or etp one of them, or there are more stages than layers and no table that says so;
                all of them are named. Or the table is one for another layout or number of layers.
        """
        cut = {"num_heads": self.num_heads}
        if not all(self.moe_layers):
            cut["ffn_hidden_size"] = self.ffn_size
        faults = [
            f"{name} {size} is not a multiple of tp={layout.tp}"
            for name, size in cut.items()
            if size % layout.tp
        ]
        if self.query_groups % layout.tp and layout.tp % self.query_groups:
            faults.append(
                f"num_query_groups {self.query_groups} is neither a multiple nor a divisor of tp={layout.tp}"
            )
        if self.moe is not None:
            faults += self.moe.faults(layout)
        if layout.cp > 1 and self.seq_length % (2 * layout.cp):
            faults.append(f"seq_length {self.seq_length} is not a multiple of 2 x cp={layout.cp}")
        if stages is None and self.num_layers < layout.pp * layout.vpp:
            chunks = f"pp={layout.pp} stages" + (f" x vpp={layout.vpp}" if layout.vpp > 1 else "")
            faults.append(f"num_layers {self.num_layers} are fewer than {chunks}")
        if faults:
            raise DeclarationError(f"GPTConfig does not fit {layout}: {'; '.join(faults)}. Change either.")
        if stages is not None:
            stages.check_num_layers(self.num_layers)
            stages.check_layout(pp=layout.pp, vpp=layout.vpp)
