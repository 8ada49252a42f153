"""What a GPT is, independent of how many ranks it runs on.

Sizes and choices, and the check that a parallel layout is possible with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from megackpt.errors import DeclarationError
from megackpt.training.parallel import MambaSizes, ParallelLayout, StageTable
from models.block_config import (
    AttentionConfig,
    DeltaNetConfig,
    LearnedPositions,
    MLPConfig,
    MoEConfig,
    MTPConfig,
    NoPositions,
    NormConfig,
    RotaryConfig,
)

# The kinds of layers that a model has: which blocks each layer is made of.

BlockKind: TypeAlias = Literal["attention", "delta_net", "mamba", "mlp", "moe"]
LayerBlocks: TypeAlias = tuple[BlockKind, ...]
"""The blocks of a layer in order: one that mixes tokens, one that does not, or both."""

MIXERS: tuple[BlockKind, ...] = ("attention", "delta_net", "mamba")
"""Blocks that mix the tokens of a sequence."""

MLPS: tuple[BlockKind, ...] = ("mlp", "moe")
"""Blocks that look at each token by itself."""


def check_layer_blocks(layers: tuple[LayerBlocks, ...], num_layers: int) -> None:
    """Check the blocks of all layers of a model. Pure.

    Raises:
        DeclarationError: another number of layers, a block of no known kind, or a layer that is made of
            something else than one mixer, one MLP or `moe`, or one of each in this order.
    """
    if len(layers) != num_layers:
        raise DeclarationError(
            f"GPTConfig.layer_blocks has {len(layers)} layers, but num_layers is {num_layers}. Give the "
            f"blocks of each layer."
        )
    for index, blocks in enumerate(layers):
        mixers = [block for block in blocks if block in MIXERS]
        mlps = [block for block in blocks if block in MLPS]
        is_one_of_each = len(mixers) <= 1 and len(mlps) <= 1 and blocks
        if not is_one_of_each or [*mixers, *mlps] != list(blocks):
            raise DeclarationError(
                f"GPTConfig.layer_blocks[{index}] is {blocks!r}. Give one of {', '.join(MIXERS)}, one of "
                f"{', '.join(MLPS)}, or one of each in this order."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes and choices of a decoder-only transformer.

    As it stands, one with rotary positions, RMSNorm and gated MLPs; the choices of the blocks are values of
    their own.

    Attributes:
        vocab_size: number of token ids, without padding.
        hidden_size: extent of a hidden state.
        num_layers: transformer layers over all pipeline stages.
        num_heads: query heads; they divide hidden_size, unless attention.head_dim says how large one is.
        num_query_groups: key and value heads (grouped-query attention); None gives one per query head.
        ffn_hidden_size: extent inside the MLP; None gives about 8/3 of hidden_size, in steps of 64.
        seq_length: longest sequence.
        dropout: probability, for attention weights and for the output of each block.
        tied_embeddings: use the embedding as the output weight too.
        linear_bias: whether the linear layers of the blocks have biases.
        rope_base: base of the rotary frequencies, if `positions` is None.
        norm_eps: added to the mean square, or variance, in the norms.
        init_std: standard deviation of the initial weights.
        make_vocab_divisible: rows of the vocabulary per tp rank are a multiple of this.
        params_dtype: dtype of parameters and activations.
        moe: the mixture of experts that layers have instead of the MLP; None if all layers are dense.
        positions: how layers see positions; None for rotary ones of rope_base.
        norm: choices of the norms.
        attention: choices of self-attention.
        mamba: sizes of the Mamba-2 mixers that `layer_blocks` names; None if there are none.
        mlp: choices of the MLP.
        embedding_scale: what embeddings of tokens are multiplied by; None leaves them as they are.
        mtp: layers that predict further tokens; None if there are none.
        delta_net: sizes of the gated delta nets that layers have by `layer_blocks`; None if none has one.
        layer_blocks: the blocks of each layer, such as `("attention", "mlp")` or `("moe",)`; None gives all
            layers attention and then an MLP, or experts where `moe` says so.
        logit_softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them as they are.

    Raises:
        DeclarationError: a size below 1, heads that do not divide, a probability outside of [0, 1), a
            sequence with a value for each layer that has another length than num_layers, an odd number of
            rotated dims, fewer learned positions than seq_length, or blocks that a layer cannot have.
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
    positions: RotaryConfig | LearnedPositions | NoPositions | None = None
    norm: NormConfig = field(default_factory=NormConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mamba: MambaSizes | None = None
    mlp: MLPConfig = field(default_factory=MLPConfig)
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    mtp: MTPConfig | None = None
    delta_net: DeltaNetConfig | None = None
    layer_blocks: tuple[LayerBlocks, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"GPTConfig.{name} is {getattr(self, name)}. It must be at least 1.")
        self._check_heads()
        self._check_positions()
        if self.query_groups < 1 or self.num_heads % self.query_groups:
            raise DeclarationError(
                f"GPTConfig.num_query_groups {self.query_groups} does not divide num_heads {self.num_heads}. "
                f"Choose a divisor."
            )
        if self.ffn_size < 1:
            raise DeclarationError(f"GPTConfig.ffn_hidden_size is {self.ffn_size}. It must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise DeclarationError(f"GPTConfig.dropout is {self.dropout}. It must be in [0, 1).")
        self._check_blocks()
        if self.logit_softcap is not None and not 0 < self.logit_softcap < math.inf:
            raise DeclarationError(
                f"GPTConfig.logit_softcap is {self.logit_softcap}. Give a positive number, or None."
            )

    def _check_blocks(self) -> None:
        if self.layer_blocks is not None:
            check_layer_blocks(self.layer_blocks, self.num_layers)
            has_experts = any(self.moe_layers)
            if has_experts != (self.moe is not None) or (self.moe is not None and self.moe.layer_freq != 1):
                raise DeclarationError(
                    f"GPTConfig.layer_blocks has {'' if has_experts else 'no '}layers with experts, and moe "
                    f"is {self.moe}. Give moe, with a layer_freq of 1, exactly if a layer has experts."
                )
        elif self.moe is not None and len(self.moe.pattern(self.num_layers)) != self.num_layers:
            raise DeclarationError(
                f"GPTConfig.moe has a layer_freq of {len(self.moe.pattern(self.num_layers))} layers, but "
                f"num_layers is {self.num_layers}. Give one number for each layer."
            )
        if any("delta_net" in blocks for blocks in self.blocks) != (self.delta_net is not None):
            raise DeclarationError(
                f"GPTConfig.delta_net is {self.delta_net}. Give it exactly if layer_blocks has a delta_net."
            )
        if (self.mamba is not None) != any("mamba" in blocks for blocks in self.blocks):
            raise DeclarationError(
                f"GPTConfig.mamba is {self.mamba}. Give its sizes exactly if a layer of layer_blocks has "
                f"mamba."
            )

    def _check_heads(self) -> None:
        latent, has_own_dim = self.attention.latent, self.attention.head_dim is not None
        if latent is not None and self.query_groups != self.num_heads:
            raise DeclarationError(
                f"GPTConfig.num_query_groups is {self.query_groups} with latent attention, which has a key "
                f"for each of num_heads {self.num_heads}. Leave it at None."
            )
        if latent is None and not has_own_dim and self.hidden_size % self.num_heads:
            raise DeclarationError(
                f"GPTConfig.hidden_size {self.hidden_size} cannot be cut into num_heads {self.num_heads} "
                f"heads of even size. Choose hidden_size as a multiple of {2 * self.num_heads}, or give "
                "attention.head_dim."
            )

    def _check_positions(self) -> None:
        """Check the dims that rotary positions need, the count of learned ones, and the list of windows."""
        if isinstance(self.positions, LearnedPositions) and self.mtp is not None:
            raise DeclarationError(
                "GPTConfig.mtp needs rotary positions, as its embeddings are those of later tokens. Choose "
                "them, or leave mtp at None."
            )
        if isinstance(self.positions, LearnedPositions) and self.positions.count < self.seq_length:
            raise DeclarationError(
                f"GPTConfig.positions has {self.positions.count} learned positions, but seq_length is "
                f"{self.seq_length}. Give as many, or a smaller seq_length."
            )
        window = self.attention.window
        if window is not None and window.layers is not None and len(window.layers) != self.num_layers:
            raise DeclarationError(
                f"GPTConfig.attention.window.layers has {len(window.layers)} layers, but num_layers is "
                f"{self.num_layers}. Give one value for each layer."
            )
        for layer in range(self.num_layers):
            self._check_rotary(self.rotary_of(layer))

    def _check_rotary(self, rotary: RotaryConfig | None) -> None:
        if rotary is None:
            return
        latent = self.attention.latent
        head_dim = self.head_dim if latent is None else latent.qk_pos_emb_head_dim
        dims, least = rotary.rotated_dims(head_dim), rotary.min_dims
        if dims % 2 or dims < least:
            raise DeclarationError(
                f"GPTConfig: rotary positions rotate {dims} of the {head_dim} dims of a head "
                f"(hidden_size {self.hidden_size}, num_heads {self.num_heads}), but need an even number "
                f"of at least {least}. Choose heads of another size, such as hidden_size a multiple of "
                f"{least * self.num_heads}, or another fraction."
            )

    @property
    def head_dim(self) -> int:
        """Extent of one attention head, of queries and keys."""
        if (latent := self.attention.latent) is not None:
            return latent.head_dim
        given_dim = self.attention.head_dim
        return self.hidden_size // self.num_heads if given_dim is None else given_dim

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a token attends to in a layer, itself included; None for all before it."""
        window = self.attention.window
        return window.size if window is not None and self._has_window(layer) else None

    def rotary_of(self, layer: int) -> RotaryConfig | None:
        """Return the rotary positions of a layer; None if it has none."""
        window = self.attention.window
        if window is not None and window.rotary is not None and self._has_window(layer):
            return window.rotary
        if self.positions is None:
            return RotaryConfig(base=self.rope_base)
        return self.positions if isinstance(self.positions, RotaryConfig) else None

    def _has_window(self, layer: int) -> bool:
        window = self.attention.window
        return window is not None and (window.layers is None or window.layers[layer])

    @property
    def query_groups(self) -> int:
        """Number of key and value heads."""
        return self.num_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def ffn_size(self) -> int:
        """Extent inside the MLP."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64  # three matrices as large as the usual two of 4 h

    @property
    def blocks(self) -> tuple[LayerBlocks, ...]:
        """For each layer, its blocks in order."""
        if self.layer_blocks is not None:
            return self.layer_blocks
        sparse = (False,) * self.num_layers if self.moe is None else self.moe.pattern(self.num_layers)
        return tuple(("attention", "moe" if has_experts else "mlp") for has_experts in sparse)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it has a mixture of experts."""
        return tuple("moe" in blocks for blocks in self.blocks)

    def check_layout(self, layout: ParallelLayout, stages: StageTable | None = None) -> None:
        """Check that `layout`, with a table of its stages or an even one, can hold this model. Pure.

        Raises:
            DeclarationError: tp does not divide the heads or MLP, neither of tp and the query groups divides
                the other, tp x cp does not divide the heads of Mamba or gated delta nets, sequences cannot be
                cut into two parts for each rank of cp, ep does not divide the experts or etp one of them, or
                there are more stages than layers and no table that says so; all of them are named. Or the
                table is one for another layout or number of layers.
        """
        kinds = {block for blocks in self.blocks for block in blocks}
        cut = {"num_heads": self.num_heads} if "attention" in kinds else {}
        if "mlp" in kinds:
            cut["ffn_hidden_size"] = self.ffn_size
        faults = [
            f"{name} {size} is not a multiple of tp={layout.tp}"
            for name, size in cut.items()
            if size % layout.tp
        ]
        if "attention" in kinds and self.query_groups % layout.tp and layout.tp % self.query_groups:
            faults.append(
                f"num_query_groups {self.query_groups} is neither a multiple nor a divisor of tp={layout.tp}"
            )
        for sizes in (self.moe, self.delta_net, self.mamba):
            faults += [] if sizes is None else sizes.faults(layout)
        if layout.cp > 1 and self.seq_length % (2 * layout.cp):
            faults.append(f"seq_length {self.seq_length} is not a multiple of 2 x cp={layout.cp}")
        if stages is None and self.num_layers < layout.pp * layout.vpp:
            chunks = f"pp={layout.pp} stages" + (f" x vpp={layout.vpp}" if layout.vpp > 1 else "")
            faults.append(f"num_layers {self.num_layers} are fewer than {chunks}")
        if faults:
            name = type(self).__name__
            raise DeclarationError(f"{name} does not fit {layout}: {'; '.join(faults)}. Change either.")
        if stages is not None:
            stages.check_num_layers(self.num_layers)
            stages.check_layout(pp=layout.pp, vpp=layout.vpp)
