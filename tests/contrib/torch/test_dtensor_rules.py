"""DTensors of any placement: what is stored of them, and what raises an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import megackpt
from megackpt.testing.ranks import RankPool

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


def _copies(path: str, kind: str) -> list[float]:
    """On each column of a grid the same array over the ranks of the column, which no mesh joins."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    values = torch.arange(4.0) + (grid.get_coordinate()[1] if kind != "equal" else 0)
    array = distribute_tensor(values, grid["dp"], [Shard(0)])
    megackpt.save({"norm": array}, path, validate_access_integrity=kind != "unproven")
    asked = distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)])
    megackpt.load({"norm": asked}, path)
    return asked.full_tensor().tolist()


def test_copies_on_meshes_that_do_not_know_of_each_other_are_stored_once(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    assert rank_pool.run(_copies, 4, str(tmp_path / "step"), "equal") == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert sum(_data_nbytes(file) for file in (tmp_path / "step" / "data").iterdir()) == 16


def _data_nbytes(file: Path) -> int:
    content = file.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_such_copies_that_differ_raise_an_error_that_names_them(rank_pool: RankPool, tmp_path: Path) -> None:
    for outcome in rank_pool.outcomes(_copies, 4, str(tmp_path / "step"), "unequal"):
        assert isinstance(outcome.error, megackpt.MismatchError)
        assert outcome.error.key == "norm"
        assert "'norm[0:2]': ranks 0 and ranks 1 hold different values" in str(outcome.error)
        assert "'norm[2:4]': ranks 2 and ranks 3 hold different values" in str(outcome.error)
        assert "stages of a pipeline" in str(outcome.error)


def test_without_validation_such_copies_are_those_of_the_lowest_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    assert rank_pool.run(_copies, 4, str(tmp_path / "step"), "unproven") == [[0.0, 1.0, 2.0, 3.0]] * 4


def _saves_of_one_structure(root: str) -> list[Any]:
    """Four saves, of which some find their plan made; then copies differ, then are no DTensors any more."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    array = distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)])
    checkpointer = megackpt.Checkpointer(root)
    for step in (1, 2):
        array.to_local().fill_(step)
        checkpointer.save(step, {"norm": array})
    row, column = grid.get_coordinate()
    array.to_local().fill_(column)
    unmarked = megackpt.ShardedTensor.from_rank_offsets("norm", torch.zeros(2), (0, row, 2))
    texts = []
    for step, norm in ((3, array), (4, unmarked)):
        try:
            checkpointer.save(step, {"norm": norm})
        except megackpt.CheckpointError as error:
            texts.append(str(error))
    asked = distribute_tensor(torch.zeros(4), grid["dp"], [Shard(0)])
    checkpointer.load({"norm": asked})
    return [asked.full_tensor().tolist(), texts]


def test_copies_are_compared_and_stored_once_with_a_plan_that_was_kept(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for result, texts in rank_pool.run(_saves_of_one_structure, 4, str(tmp_path)):
        assert result == [2.0] * 4
        assert "'norm[0:2]': ranks 0 and ranks 1 hold different values" in texts[0]
        assert "'norm': elements [0:4] are saved by more than one main replica" in texts[1]
    for step in ("iter_0000001", "iter_0000002"):
        assert sum(_data_nbytes(file) for file in (tmp_path / step / "data").iterdir()) == 16


def _error_of(path: str, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    states: dict[str, Any] = {
        "partial": {"a": {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()])}},
        "uneven": {
            "w": DTensor.from_local(
                torch.ones(1 + 2 * dist.get_rank()), mesh, [Shard(0)], shape=(4,), stride=(1,)
            )
        },
        "twice": {"a": {"b": sharded}, "a.b": sharded},
        "tuple": {"a": (sharded, 1)},
    }
    megackpt.save(states[kind], path)


@pytest.mark.parametrize(
    ("kind", "kept", "text"),
    [
        (
            "partial",
            megackpt.DeclarationError,
            r"'a\.w': the DTensor is placed as \(Partial\(sum\),\): a Partial is a sum .* Call redistribute",
        ),
        (
            "uneven",
            megackpt.DeclarationError,
            r"'w': .* means a local tensor of shape \(2,\) here, but it has \(1,\)\. Shard it as torch.chunk",
        ),
        (
            "twice",
            megackpt.DeclarationError,
            r"'a\.b': two tensors .*\['a'\]\['b'\] and \['a\.b'\]. Rename one of the dict keys",
        ),
        ("tuple", megackpt.DeclarationError, r"a: a DTensor is inside of a tuple. Use a list or a dict"),
    ],
)
def test_what_cannot_be_saved_raises_an_error_with_what_to_do(
    kind: str, kept: type[Exception], text: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    for outcome in rank_pool.outcomes(_error_of, 2, str(tmp_path / "step"), kind):
        with pytest.raises(kept, match=text):
            raise outcome.error or AssertionError("it was saved")


def _dtensor_in_an_entity(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    megackpt.save({"w": megackpt.ShardedTensor.from_rank_offsets("w", sharded)}, path)


def test_a_dtensor_as_the_data_of_an_entity_raises_an_error(rank_pool: RankPool, tmp_path: Path) -> None:
    for outcome in rank_pool.outcomes(_dtensor_in_an_entity, 2, str(tmp_path / "step")):
        with pytest.raises(megackpt.DeclarationError, match=r"'w': data is a DTensor.*to_local"):
            raise outcome.error or AssertionError("it was saved")
