"""Flat ranges of chunks, asked for in the chunks of another layout.

Megackpt cuts a flat shard into rectangles and loads it at any layout by itself: `load` needs no
reformulation. These functions are for programs that work with Megatron-Core's reformulated shapes: an array
of shape [X, Y] in chunks of [x, y] has the reformulated shape [X / x, Y / y, x * y].

Source: Megatron-Core up to 0.15, `dist_checkpointing.strategies.resharding`, for names and behaviour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
)
from megackpt.contrib.megatron.dist_checkpointing.mapping import apply_factories, apply_factory_merges
from megackpt.entities import ShardedStateDict, ShardedTensor, ShardedTensorFactory, StateDict
from megackpt.errors import DeclarationError

ReformulationRestoreMetadata = ShardedStateDict
"""Factories that put a reformulated state dict back into its own shapes."""


@dataclass
class TensorReformulationMetadata:
    """How an array is stored.

    Attributes:
        ckpt_orig_global_shape: its shape.
        ckpt_reform_global_shape: the reformulated one: chunks along each dim, then elements of a chunk.
    """

    ckpt_orig_global_shape: tuple[int, ...]
    ckpt_reform_global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ckpt_orig_global_shape:
            raise DeclarationError("ckpt_orig_global_shape is empty. Give the shape of the stored array.")

    def chunk_shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored chunk of the array under this key, prepended dims as 1.

        Raises:
            DeclarationError: the two shapes do not fit each other.
        """
        shape, chunks = self.ckpt_orig_global_shape, self.ckpt_reform_global_shape[:-1]
        is_even = len(shape) == len(chunks) and all(
            count > 0 and extent % count == 0 for extent, count in zip(shape, chunks, strict=True)
        )
        chunk_extents = tuple(e // c for e, c in zip(shape, chunks, strict=True)) if is_even else ()
        if not is_even or math.prod(chunk_extents) != self.ckpt_reform_global_shape[-1]:
            raise DeclarationError(
                f"{key!r}: the shape {shape} is not {self.ckpt_reform_global_shape} when it is reformulated. "
                f"Give the number of chunks along each dim, which divide it evenly, and the elements of a "
                f"chunk.",
                key=key,
            )
        return chunk_extents


def is_nd_flattened_tensor(sh_ten: Any) -> bool:
    """Return whether something is a ShardedTensor that is a flat range of a chunk."""
    return isinstance(sh_ten, ShardedTensor) and sh_ten.flattened_range is not None


def nd_flattened_tensor_reformulated_global_shape(sh_ten: ShardedTensor) -> tuple[int, ...]:
    """Return the reformulated global shape of a flat range of a chunk. Pure.

    Raises:
        DeclarationError: it is none, or its array is not cut evenly.
    """
    if not is_nd_flattened_tensor(sh_ten) or sh_ten.axis_fragmentations is None:
        raise DeclarationError(
            f"{sh_ten.key!r} is no flat range of an evenly cut array. Declare it with flattened_range and "
            f"axis_fragmentations.",
            key=sh_ten.key,
        )
    return (*sh_ten.axis_fragmentations, math.prod(sh_ten.local_shape))


def apply_nd_flattened_tensors_reformulation(
    sharded_state_dict: ShardedStateDict, reformulation_metadata: dict[str, TensorReformulationMetadata]
) -> tuple[ShardedStateDict, ReformulationRestoreMetadata]:
    """Ask for stored chunks in the place of flat ranges of other chunks, in place.

    Returns the state dict to be loaded, and what `restore_nd_flattened_tensors_formulation` then needs.

    Raises:
        DeclarationError: the metadata lacks a key, or does not fit it. One-dimensional arrays may be missing.
    """
    dict_list_map_inplace(lambda leaf: _reformulated(leaf, reformulation_metadata), sharded_state_dict)
    factories, _ = extract_matching_values(
        sharded_state_dict, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(sharded_state_dict)
    return sharded_state_dict, factories


def _reformulated(leaf: Any, metadata_of_key: dict[str, TensorReformulationMetadata]) -> Any:
    """Return a factory for a flat range whose array is stored in other chunks; other leaves as they are."""
    if not is_nd_flattened_tensor(leaf):
        return leaf
    metadata = metadata_of_key.get(leaf.key)
    if metadata is None and len(leaf.global_shape) == 1:
        return leaf
    if metadata is None:
        raise DeclarationError(
            f"{leaf.key!r} has no reformulation metadata; there is some for {sorted(metadata_of_key)}. Give "
            f"it for every key, or load without reformulation.",
            key=leaf.key,
        )
    if nd_flattened_tensor_reformulated_global_shape(leaf) == metadata.ckpt_reform_global_shape:
        return leaf
    return reformulate_single_nd_flattened_tensor(leaf, metadata)


def restore_nd_flattened_tensors_formulation(
    state_dict: StateDict, formulation_restore_metadata: ReformulationRestoreMetadata
) -> StateDict:
    """Return a loaded state dict with the flat ranges that were asked for first, in place. Local."""
    restored: StateDict = apply_factory_merges(state_dict, formulation_restore_metadata)
    return restored


def reformulate_single_nd_flattened_tensor(
    sh_ten: ShardedTensor, reformulation_metadata: TensorReformulationMetadata
) -> ShardedTensorFactory:
    """Return a factory of the stored chunks that a tensor overlaps, which takes its flat range out of them.

    Raises:
        DeclarationError: the metadata does not fit the tensor.
    """
    chunk: tuple[int, ...] = reformulation_metadata.chunk_shape(sh_ten.key)
    prepended = sh_ten.prepend_axis_num
    start, extent = tuple(sh_ten.global_offset), (1,) * prepended + tuple(sh_ten.local_shape)
    if len(start) != len(chunk) or chunk[:prepended] != extent[:prepended]:
        raise DeclarationError(
            f"{sh_ten.key!r}: chunks of {chunk} are stored, and a chunk of {extent} with {prepended} "
            f"prepended dims is asked for. The dims have to be the same, and prepended ones 1.",
            key=sh_ten.key,
        )
    # Along each dim of the grid of stored chunks: from the chunk of the first element to that of the last.
    along = [range(s // c, -(-(s + e) // c)) for s, e, c in zip(start, extent, chunk, strict=True)]
    offsets = [tuple(n * c for n, c in zip(numbers, chunk, strict=True)) for numbers in product(*along)]
    shards = {
        (offset, chunk[prepended:]): ShardedTensor(
            sh_ten.key,
            None,
            sh_ten.dtype,
            chunk[prepended:],
            reformulation_metadata.ckpt_orig_global_shape,
            offset,
            reformulation_metadata.ckpt_reform_global_shape[:-1],
            sh_ten.replica_id,
            prepended,
            sh_ten.allow_shape_mismatch,
            slice(0, math.prod(chunk)),
        )
        for offset in offsets
    }
    return ShardedTensorFactory(
        sh_ten.key,
        None,
        lambda *_: shards,
        lambda loaded: _merge_chunks(sh_ten, {chunk: loaded[chunk] for chunk in shards}),
        sh_ten.replica_id,
        sh_ten.flattened_range,
    )


def _merge_chunks(
    tensor: ShardedTensor, chunks: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor]
) -> torch.Tensor:
    """Return the flat range of a tensor, from loaded flat chunks, by global offset and local shape."""
    prepended = tensor.prepend_axis_num
    whole: torch.Tensor | None = None
    for (offset, shape), flat in chunks.items():
        if whole is None:
            whole = torch.empty(tensor.local_shape, dtype=tensor.dtype, device=flat.device)
        # The box that the stored chunk and the tensor have in common, in the coordinates of each.
        ours, theirs = tensor.global_offset[prepended:], offset[prepended:]
        low = [max(o, t) for o, t in zip(ours, theirs, strict=True)]
        ends = zip(ours, tensor.local_shape, theirs, shape, strict=True)
        high = [min(o + e, t + s) for o, e, t, s in ends]
        into = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, ours, strict=True))
        source = tuple(slice(a - t, b - t) for a, b, t in zip(low, high, theirs, strict=True))
        whole[into] = flat.detach().reshape(shape)[source]
    if whole is None:
        raise DeclarationError(f"{tensor.key!r}: no chunk was loaded to take it from.", key=tensor.key)
    return whole.reshape(-1)[tensor.flattened_range]
