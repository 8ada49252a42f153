"""The kinds of layers that a model has: which blocks each layer is made of."""

from __future__ import annotations

from typing import Literal, TypeAlias

from megackpt.errors import DeclarationError

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
