"""Reformulated shapes of flat ranges, as Megatron-Core up to 0.15 asked for them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.compat.megatron import dist_checkpointing
from megackpt.compat.megatron.dist_checkpointing import mapping
from megackpt.compat.megatron.dist_checkpointing.strategies import resharding

S = mapping.ShardedTensor
SHAPE = (4, 6)
WHOLE = torch.arange(24.0).reshape(SHAPE)
LAYERS = torch.stack([WHOLE, -WHOLE])


def parts(chunks: tuple[int, int], *, cut: int, layers: bool = False) -> dict[str, Any]:
    """Return the flat ranges, two of each chunk, of an array in so many chunks along each dim."""
    values: dict[str, Any] = {}
    chunk = tuple(extent // count for extent, count in zip(SHAPE, chunks, strict=True))
    for layer, row, column in product(range(1 + layers), range(chunks[0]), range(chunks[1])):
        source = LAYERS[layer] if layers else WHOLE
        box = source[row * chunk[0] :, column * chunk[1] :][: chunk[0], : chunk[1]].reshape(-1)
        offsets = [(int(layers), row, chunks[0]), (1 + int(layers), column, chunks[1])]
        for flat in (slice(0, cut), slice(cut, box.numel())):
            values[f"{layer}.{row}.{column}.{flat.start}"] = S.from_rank_offsets_flat(
                "w",
                box[flat].clone(),
                chunk,
                *([(0, layer, 2)] if layers else []),
                *offsets,
                flattened_range=flat,
                prepend_axis_num=int(layers),
            )
    return values


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("stored", [(1, 1), (2, 3), (4, 2)])
def test_flat_ranges_are_taken_out_of_the_chunks_of_another_layout(
    tmp_path: Path, stored: tuple[int, int], layers: bool
) -> None:
    path = str(tmp_path / "c")
    dist_checkpointing.save(parts(stored, cut=2, layers=layers), path)
    shape = ((2,) if layers else ()) + SHAPE
    grid = ((2,) if layers else ()) + stored
    numel = 24 // (stored[0] * stored[1])
    metadata = {"w": resharding.TensorReformulationMetadata(shape, (*grid, numel))}
    for asked in [(1, 1), (2, 3), (2, 1), (4, 3), (1, 6)]:
        wanted = parts(asked, cut=1, layers=layers)
        expected = {key: part.data for key, part in wanted.items()}
        request = {"model": {key: part.without_data() for key, part in wanted.items()}}
        first = next(iter(request["model"].values()))
        is_same = asked == stored
        reformulated = resharding.nd_flattened_tensor_reformulated_global_shape(first)
        assert (reformulated == metadata["w"].ckpt_reform_global_shape) == is_same
        request, restore = resharding.apply_nd_flattened_tensors_reformulation(request, metadata)
        assert (restore == {}) == is_same
        loaded = dist_checkpointing.load(request, path)
        restored = resharding.restore_nd_flattened_tensors_formulation(loaded, restore)
        assert set(restored["model"]) == set(expected)
        assert all(torch.equal(restored["model"][key], data) for key, data in expected.items())


def test_what_does_not_fit_raises_an_error() -> None:
    flat = next(iter(parts((2, 3), cut=2).values()))
    plain = S.from_rank_offsets("p", torch.zeros(3))
    assert [resharding.is_nd_flattened_tensor(x) for x in (flat, plain, 7)] == [True, False, False]
    with pytest.raises(megackpt.CheckpointingException, match="'p' is no flat range"):
        resharding.nd_flattened_tensor_reformulated_global_shape(plain)
    with pytest.raises(megackpt.CheckpointingException, match="'w' has no reformulation metadata"):
        resharding.apply_nd_flattened_tensors_reformulation({"w": flat}, {})
    with pytest.raises(megackpt.CheckpointingException, match="ckpt_orig_global_shape is empty"):
        resharding.TensorReformulationMetadata((), (1,))
    for shape, reformed in [((4, 6), (3, 2, 4)), ((4, 6), (2, 12)), ((4, 6), (2, 3, 5)), ((4, 6), (0, 3, 4))]:
        wrong = resharding.TensorReformulationMetadata(shape, reformed)
        with pytest.raises(megackpt.CheckpointingException, match="when it is reformulated"):
            resharding.reformulate_single_nd_flattened_tensor(flat, wrong)
    other = resharding.TensorReformulationMetadata((2, 4, 6), (2, 2, 3, 4))
    with pytest.raises(megackpt.CheckpointingException, match="dims have to be the same"):
        resharding.reformulate_single_nd_flattened_tensor(flat, other)
