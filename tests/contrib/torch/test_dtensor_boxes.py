"""What a rank of a mesh holds of an array: against the definition, and against torch's own function."""

from __future__ import annotations

import math
import sys
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

import megackpt
from megackpt.geometry.mesh import MeshBox, MeshCut, mesh_boxes
from megackpt.mapping.torch_sharded import adopt_torch_sharded_tensors
from megackpt.mapping.tree import PathKeys


@st.composite
def meshed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[MeshCut | None]]:
    """A global shape, a mesh shape and its cuts, of which any may be uneven."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    cut = st.builds(MeshCut, st.integers(0, len(shape) - 1), st.integers(1, 3))
    return shape, mesh, [draw(st.none() | cut) for _ in mesh]


def coordinates(mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(product(*map(range, mesh)))


def whole(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def cut_by_definition(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], cuts: list[MeshCut | None]
) -> torch.Tensor:
    """The local tensor by the definition: each placement splits what the ones before have left."""
    local = whole(shape)
    for cut, parts, index in zip(cuts, mesh, at, strict=True):
        if cut is not None:
            first = chunks(local, cut.split_factor, cut.dim)
            local = torch.cat([chunks(part, parts, cut.dim)[index] for part in first], dim=cut.dim)
    return local


def chunks(tensor: torch.Tensor, parts: int, dim: int) -> list[torch.Tensor]:
    """torch.chunk, filled up with empty ones."""
    chunks = list(tensor.chunk(parts, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (parts - len(chunks))


class Mesh:
    """What torch asks of a DeviceMesh to compute offsets, without processes."""

    def __init__(self, shape: tuple[int, ...], at: tuple[int, ...]) -> None:
        self.shape, self.ndim, self._at = shape, len(shape), at

    def size(self, mesh_dim: int) -> int:
        return self.shape[mesh_dim]

    def get_coordinate(self) -> list[int]:
        return list(self._at)

    def _is_current_rank_part_of_mesh(self) -> bool:
        return True

    def _sym_get_coordinate(self, mesh_dim: int) -> int:
        return self._at[mesh_dim]


def assembled(boxes: list[MeshBox], shape: tuple[int, ...]) -> torch.Tensor:
    """The local tensor that boxes describe."""
    extents = [max(b.local_start[d] + b.box.shape[d] for b in boxes) for d in range(len(shape))]
    local = torch.full(extents, -1)
    for owned in boxes:
        at = tuple(slice(a, a + n) for a, n in zip(owned.local_start, owned.box.shape, strict=True))
        local[at] = whole(shape)[owned.box.slices()]
    return local


@given(meshed())
def test_boxes_hold_what_the_placements_leave_in_the_local_tensor(
    case: tuple[tuple[int, ...], tuple[int, ...], list[MeshCut | None]],
) -> None:
    shape, mesh, cuts = case
    for at in coordinates(mesh):
        expected = cut_by_definition(shape, mesh, at, cuts)
        assert torch.equal(assembled(mesh_boxes(shape, mesh, at, cuts), shape), expected), (at, cuts)


@given(meshed())
def test_the_ranks_that_are_no_copies_of_others_tile_the_array(
    case: tuple[tuple[int, ...], tuple[int, ...], list[MeshCut | None]],
) -> None:
    shape, mesh, cuts = case
    count = torch.zeros(shape, dtype=torch.int64)
    for at in coordinates(mesh):
        if all(i == 0 for i, cut in zip(at, cuts, strict=True) if cut is None):
            for owned in mesh_boxes(shape, mesh, at, cuts):
                count[owned.box.slices()] += 1
    assert torch.equal(count, torch.ones_like(count))


@given(meshed())
def test_plain_cuts_give_the_offset_that_torch_computes(
    case: tuple[tuple[int, ...], tuple[int, ...], list[MeshCut | None]],
) -> None:
    shape, mesh, cuts = case
    cuts = [cut and MeshCut(cut.dim) for cut in cuts]
    placements = [Replicate() if cut is None else Shard(cut.dim) for cut in cuts]
    for at in coordinates(mesh):
        (owned,) = mesh_boxes(shape, mesh, at, cuts)
        local_shape, offset = compute_local_shape_and_global_offset(shape, Mesh(mesh, at), placements)
        assert owned.box.shape == tuple(local_shape)
        if owned.box.numel:  # where nothing is lies where it likes
            assert owned.box.start == tuple(offset)
        assert owned.local_start == (0,) * len(shape)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4))
def test_fsdp_over_tp_gives_each_rank_one_box_where_it_is_even(fsdp: int, tp: int, rows: int) -> None:
    """The placements of fully_shard over parallelize_module: cut by tp first, then by fsdp."""
    shape, cuts = (fsdp * tp * rows, 3), [MeshCut(0, tp), MeshCut(0)]
    placements = [_StridedShard(0, split_factor=tp), Shard(0)]
    for at in coordinates((fsdp, tp)):
        (owned,) = mesh_boxes(shape, (fsdp, tp), at, cuts)
        expected = compute_local_shape_and_global_offset(shape, Mesh((fsdp, tp), at), placements)
        assert (owned.box.shape, owned.box.start) == expected


def test_the_order_of_cuts_can_be_given() -> None:
    """Cuts from right to left are what a strided cut on the left stands for."""
    for at in coordinates((2, 2)):
        plain = mesh_boxes((8,), (2, 2), at, [MeshCut(0), MeshCut(0)], order=[1, 0])
        assert plain == mesh_boxes((8,), (2, 2), at, [MeshCut(0, 2), MeshCut(0)])


def test_a_mesh_that_does_not_fit_raises_an_error() -> None:
    for mesh, at, cut in (((2,), (2,), MeshCut(0)), ((2,), (0, 0), MeshCut(0)), ((2,), (0,), MeshCut(1))):
        with pytest.raises(megackpt.GeometryError, match="do not fit an array of shape"):
            mesh_boxes((4,), mesh, at, [cut])


def test_dtensors_are_not_looked_for_before_torch_has_loaded_their_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    state = {"w": torch.zeros(2)}
    assert adopt_torch_sharded_tensors(state, {torch.Tensor}, PathKeys()) is state
    assert "torch.distributed.tensor" not in sys.modules
