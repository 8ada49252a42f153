"""DTensors of any placement: what a rank of a mesh holds, what is stored, and what raises an error.

What a rank holds is compared with the definition, and with torch's own function.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import megackpt
from megackpt.entities.flatten import adapter_of, flatten_state
from megackpt.errors import GeometryError
from megackpt.plans.geometry.box import MeshBox, MeshCut, mesh_boxes
from megackpt.testing.ranks import RankPool
from tests.contrib.torch.worlds import data_nbytes

WHOLE = torch.arange(11 * 6, dtype=torch.float32).reshape(11, 6)


def _distributed(name: str, *, filled: bool = True) -> DTensor:
    """WHOLE, or zeros of its shape, in a placement of this name. Collective over 4 ranks."""
    whole = WHOLE if filled else torch.zeros_like(WHOLE)
    if name == "outside":  # two of the four ranks have no part in it
        return distribute_tensor(whole, DeviceMesh("cpu", [1, 2]), [Shard(0)])
    grid = init_device_mesh("cpu", (2, 2))
    if name == "strided":  # on each rank two boxes, of which one may be smaller
        local = [whole[[*range(3), *range(6, 9)]], whole[[*range(3, 6), *range(9, 11)]]]
        own = local[grid.get_coordinate()[0]].clone()
        placements = [_StridedShard(0, split_factor=2), Replicate()]
        return DTensor.from_local(own, grid, placements, shape=whole.shape, stride=whole.stride())
    if name == "reordered":  # the right mesh dim cuts first
        first, second = grid.get_coordinate()
        order = (_dtensor_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        meta = _dtensor_spec.TensorMeta(whole.shape, whole.stride(), whole.dtype)
        spec = _dtensor_spec.DTensorSpec(grid, (Shard(0), Shard(0)), meta, shard_order=order)
        return DTensor(whole.chunk(2)[second].chunk(2)[first].clone(), spec, requires_grad=False)
    placements = {
        "rows": [Shard(0), Shard(0)],
        "both": [Shard(1), Shard(0)],
        "replicated": [Replicate(), Replicate()],
        "half": [Replicate(), Shard(1)],
    }[name]
    return distribute_tensor(whole, grid, placements)


PLACEMENTS = ["rows", "both", "replicated", "half", "strided", "outside"]
if hasattr(_dtensor_spec, "ShardOrderEntry"):  # from torch 2.10
    PLACEMENTS.append("reordered")


def _save_and_load_all(root: str) -> list[tuple[str, str]]:
    """Save in each placement, load into each; return the pairs that are not equal."""
    wrong = []
    for source in PLACEMENTS:
        megackpt.save({"w": [_distributed(source)], "epoch": 1}, f"{root}/{source}")
        for target in PLACEMENTS:
            asked = _distributed(target, filled=False)
            loaded = megackpt.load({"w": [asked]}, f"{root}/{source}")
            expected = _distributed(target)
            is_same = torch.equal(asked.to_local(), expected.to_local()) and loaded["epoch"] == 1
            if not is_same or loaded["w"][0] is not asked:
                wrong.append((source, target))
    return wrong


def test_any_placement_loads_into_any_other(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_save_and_load_all, 4, str(tmp_path)) == [[]] * 4
    for source in PLACEMENTS:
        assert torch.equal(megackpt.load_plain_tensors(tmp_path / source)["w.0"], WHOLE)


def _small(path: str) -> list[list[float]]:
    """Arrays with fewer rows than ranks, with none, and of no dims."""
    mesh = init_device_mesh("cpu", (4,))
    wholes = [torch.arange(2.0), torch.zeros(0, 3), torch.tensor(5.0)]
    shards = [[Shard(0)], [Shard(0)], [Replicate()]]
    made = [distribute_tensor(w, mesh, s) for w, s in zip(wholes, shards, strict=True)]
    asked = [distribute_tensor(torch.zeros_like(w), mesh, s) for w, s in zip(wholes, shards, strict=True)]
    megackpt.save({"small": made}, path)
    megackpt.load({"small": asked}, path)
    return [a.full_tensor().tolist() for a in asked]


def test_ranks_without_elements_save_and_load(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(_small, 4, str(tmp_path / "step")) == [[[0.0, 1.0], [], 5.0]] * 4


def _saves_of_copies(root: str) -> list[Any]:
    """On each column of a grid the same array over the ranks of the column, which no mesh joins.

    The copies differ, then are equal in two saves, the second with the plan of the first; then they differ
    again, and are no DTensors any more. Return what loads after that, and the errors.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = grid.get_coordinate()
    array = distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)])
    asked = distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)])
    unmarked = megackpt.ShardedTensor.from_rank_offsets("norm", torch.zeros(2), (0, row, 2))
    checkpointer, errors = megackpt.Checkpointer(root), []
    for step, norm, value in (
        (1, array, column),
        (2, array, 2),
        (3, array, 3),
        (4, array, column),
        (5, unmarked, 0),
    ):
        array.to_local().fill_(value)
        try:
            checkpointer.save(step, {"norm": norm})
        except megackpt.CheckpointError as error:
            errors.append(error)
    checkpointer.load({"norm": asked})
    newest = asked.full_tensor().tolist()
    array.to_local().fill_(7 + column)
    megackpt.save({"norm": array}, f"{root}/unproven", validate_access_integrity=False)
    megackpt.load({"norm": asked}, f"{root}/unproven")
    return [newest, asked.full_tensor().tolist(), errors]


def test_copies_on_meshes_that_do_not_know_of_each_other_are_compared_and_stored_once(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for newest, unproven, (first, with_plan, unmarked) in rank_pool.run(_saves_of_copies, 4, str(tmp_path)):
        assert newest == [3.0] * 4
        assert unproven == [7.0] * 4  # without validation, those of the lowest rank
        for error in (first, with_plan):
            assert isinstance(error, megackpt.MismatchError)
            assert error.key == "norm"
            assert "'norm[0:2]': ranks 0 and ranks 1 hold different values" in str(error)
            assert "'norm[2:4]': ranks 2 and ranks 3 hold different values" in str(error)
            assert "stages of a pipeline" in str(error)
        assert "'norm': elements [0:4] are saved by more than one main replica" in str(unmarked)
    for step in ("iter_0000002", "iter_0000003"):
        assert data_nbytes(tmp_path / step) == 16


def _error_of(path: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    uneven = torch.ones(1 + 2 * dist.get_rank())
    states: dict[str, Callable[[], dict[str, Any]]] = {
        "partial": lambda: {"a": {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}},
        "uneven": lambda: {"w": DTensor.from_local(uneven, mesh, [Shard(0)], shape=(4,), stride=(1,))},
        "twice": lambda: {"a": {"b": sharded}, "a.b": sharded},
        "tuple": lambda: {"a": (sharded, 1)},
        "entity": lambda: {"w": megackpt.ShardedTensor.from_rank_offsets("w", sharded)},
    }
    megackpt.save(states[kind](), path)


ERRORS = {
    "partial": r"'a\.w': the DTensor is placed as \(Partial\(sum\),\): a Partial is a sum .*"
    r"Call redistribute",
    "uneven": r"'w': .* means a local tensor of shape \(2,\) here, but it has \(1,\)\. "
    r"Shard it as torch.chunk",
    "twice": r"'a\.b': two tensors .*\['a'\]\['b'\] and \['a\.b'\]. Rename one of the dict keys",
    "tuple": r"a: a DTensor is inside of a tuple. Use a list or a dict",
    "entity": r"'w': data is a DTensor.*to_local",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_cannot_be_saved_raises_an_error_with_what_to_do(
    kind: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    for outcome in rank_pool.outcomes(_error_of, 2, str(tmp_path / "step"), kind):
        with pytest.raises(megackpt.DeclarationError, match=ERRORS[kind]):
            raise outcome.error or AssertionError("it was saved")


Meshed: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], list[MeshCut | None]]
"""A global shape, a mesh shape and its cuts."""


@st.composite
def meshed(draw: st.DrawFn) -> Meshed:
    """Any of them may be uneven."""
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
def test_boxes_hold_what_the_placements_leave_in_the_local_tensor(case: Meshed) -> None:
    shape, mesh, cuts = case
    for at in coordinates(mesh):
        expected = cut_by_definition(shape, mesh, at, cuts)
        assert torch.equal(assembled(mesh_boxes(shape, mesh, at, cuts), shape), expected), (at, cuts)


@given(meshed())
def test_the_ranks_that_are_no_copies_of_others_tile_the_array(case: Meshed) -> None:
    shape, mesh, cuts = case
    count = torch.zeros(shape, dtype=torch.int64)
    for at in coordinates(mesh):
        if all(i == 0 for i, cut in zip(at, cuts, strict=True) if cut is None):
            for owned in mesh_boxes(shape, mesh, at, cuts):
                count[owned.box.slices()] += 1
    assert torch.equal(count, torch.ones_like(count))


@given(meshed())
def test_plain_cuts_give_the_offset_that_torch_computes(case: Meshed) -> None:
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
        with pytest.raises(GeometryError, match="do not fit an array of shape"):
            mesh_boxes((4,), mesh, at, [cut])


def test_dtensors_are_not_looked_for_before_torch_has_loaded_their_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor")
    assert adapter_of(torch.Tensor) is None
    assert flatten_state({"w": torch.zeros(2)}, rank=0, ranks=1).tensors == ()
    assert "torch.distributed.tensor" not in sys.modules
