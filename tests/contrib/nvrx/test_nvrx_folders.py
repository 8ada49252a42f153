"""Local checkpoints of nvidia-resiliency-ext become checkpoints: every array bit for bit as its ranks had it.

`folders/` is what `write` made with nvidia-resiliency-ext 0.4.1 and Megatron-Core 0.16.1. Where both
are installed, the folders are made anew.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megackpt
from megackpt import CoverageError, FormatError, NotACheckpointError
from megackpt.cli import main
from megackpt.contrib.megatron.dist_checkpointing import mapping
from megackpt.contrib.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.errors import UnsupportedError
from megackpt.run import check_is_distributed_checkpoint
from megackpt.testing.ranks import RankPool
from tests.support.checkpoints import flip

STORED = Path(__file__).parent / "folders"
ALGORITHMS = ("atomic", "fully_parallel")
NEWEST = 10


def arrays(iteration: int) -> dict[str, Tensor]:
    """The global arrays of an iteration."""
    return {
        "w": torch.arange(24.0).reshape(8, 3) + iteration,
        "layers.weight": torch.arange(40.0).reshape(2, 4, 5) - iteration,
        "same": torch.full((3,), iteration / 3, dtype=torch.bfloat16),
        "optimizer.flat": torch.arange(24.0).reshape(6, 4) * iteration,
    }


def state_of(rank: int, ranks: int, iteration: int, entities: Any) -> dict[str, Any]:
    """One rank's state dict, with the entities of a module `mapping`."""
    of_array, whole = entities.ShardedTensor.from_rank_offsets, arrays(iteration)
    layer, flat = whole["layers.weight"][rank].clone(), whole["optimizer.flat"]
    return {
        "model": {
            "w": of_array("w", whole["w"].chunk(ranks)[rank].clone(), (0, rank, ranks)),
            "layer": of_array("layers.weight", layer, (0, rank, ranks), prepend_axis_num=1),
            "same": [of_array("same", whole["same"], replica_id=rank)],
        },
        "flat": of_array("optimizer.flat", flat.chunk(ranks)[rank].clone(), (0, rank, ranks)),
        "rng": entities.ShardedObject("rng", {"seed": rank}, (ranks,), (rank,)),
        "args": argparse.Namespace(world_size=ranks),
        "scheduler": {"scale": torch.tensor(2.0)},
        "iteration": iteration,
    }


def write(folder: str, algorithm: str) -> None:
    """Save two iterations on the ranks of a pool with the real packages; the second replaces the first."""
    from megatron.core.dist_checkpointing import mapping as real
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import (
        MCoreTensorAwareStateDict as RealStateDict,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    manager = LocalCheckpointManager(folder)
    for iteration in (NEWEST - 5, NEWEST):
        kept, _ = RealStateDict.from_state_dict(state_of(rank, ranks, iteration, real), algorithm)
        manager.save(kept, iteration)


def check(folder: Path, target: Path) -> None:
    report = megackpt.import_nvrx(folder, target)
    assert (report.is_verified, report.arrays) == (True, 4)
    assert report.left_out == (
        "rng (an object of each rank, not an array)",
        "common state.args (an object of argparse.Namespace)",
    )
    stored, expected = megackpt.load_plain_tensors(target), arrays(NEWEST)
    expected["scheduler.scale"] = torch.tensor(2.0)  # of common state, where it stays
    assert stored.keys() == expected.keys()
    for key, tensor in expected.items():
        assert stored[key].dtype == tensor.dtype
        assert torch.equal(stored[key], tensor), key
    common = megackpt.load_common_state_dict(target)
    assert common == {"scheduler": {"scale": torch.tensor(2.0)}, "iteration": NEWEST}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_array_is_bit_equal_with_what_the_ranks_had(algorithm: str, tmp_path: Path) -> None:
    check(STORED / algorithm, tmp_path / "imported")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nvidia_resiliency_ext", "megatron")),
    reason="nvidia-resiliency-ext is not installed: pip install nvidia-resiliency-ext megatron-core",
)
def test_folders_that_are_written_now_are_read_like_the_stored_ones(
    rank_pool: RankPool, algorithm: str, tmp_path: Path
) -> None:
    rank_pool.run(write, 2, str(tmp_path / "local"), algorithm)
    check(tmp_path / "local", tmp_path / "imported")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(STORED / "atomic", tmp_path / "local")
    return tmp_path / "local"


def test_the_command_reads_files_of_several_nodes_and_copies_of_them(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "1", folder / "node-b" / "0")
    shutil.copy(folder / "0" / f"iter_{NEWEST:07d}_0_local.pt", folder / "1")
    (folder / "0" / f"iter_{NEWEST + 5:07d}_0_local.pt").write_bytes(b"of rank 0 only, so not read")
    assert main(["convert", str(folder), str(tmp_path / "run"), "--from", "nvrx"]) == 0
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "run")["w"], arrays(NEWEST)["w"])


def test_a_file_of_our_own_class_with_flat_shards_is_read(tmp_path: Path) -> None:
    flat = arrays(NEWEST)["optimizer.flat"]
    parts = [
        mapping.ShardedTensor.from_rank_offsets_flat(
            "flat", flat.flatten()[part].clone(), tuple(flat.shape), flattened_range=part
        )
        for part in (slice(0, 10), slice(10, 24))
    ]
    kept, _ = MCoreTensorAwareStateDict.from_state_dict({"parts": parts})
    torch.save(kept, tmp_path / "iter_0000001_0_local.pt")
    megackpt.import_nvrx(tmp_path, tmp_path / "imported")
    assert torch.equal(megackpt.load_plain_tensors(tmp_path / "imported")["flat"], flat)


def file_of_rank_1(folder: Path) -> Path:
    return folder / "1" / f"iter_{NEWEST:07d}_1_local.pt"


def mix_runs(folder: Path) -> None:
    """Put rank 1's file of a run with another model next to rank 0's."""
    entity = mapping.ShardedTensor.from_rank_offsets("w", torch.ones(4, 3).double(), (0, 1, 2))
    torch.save(MCoreTensorAwareStateDict({}, {"w": entity}), file_of_rank_1(folder))


def mix_steps(folder: Path) -> None:
    """Put rank 1's file of another step of the run next to rank 0's, under the same number."""
    state = state_of(1, 2, NEWEST + 1, mapping)
    kept = MCoreTensorAwareStateDict({}, {"model": state["model"], "flat": state["flat"]})
    torch.save(kept, file_of_rank_1(folder))


FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "all lost": (shutil.rmtree, NotACheckpointError, r"has no file 'iter_\*_local\.pt'"),
    "lost": (lambda folder: file_of_rank_1(folder).unlink(), CoverageError, r"'.*'"),
    "first lost": (
        lambda folder: shutil.rmtree(folder / "0"),
        NotACheckpointError,
        r"of iteration 10, those of ranks 0 are missing",
    ),
    "damaged": (
        lambda folder: flip(file_of_rank_1(folder), file_of_rank_1(folder).stat().st_size // 3),
        FormatError,
        r"_1_local\.pt: it is damaged",
    ),
    "of two runs": (mix_runs, FormatError, r"'w' is an array of .*, and one of .* in .*\. Pass the files"),
    "of two steps": (
        mix_steps,
        FormatError,
        r"'same' has other bits than in .*_1_local\.pt, in the part of shape \(3,\)",
    ),
    "other state": (
        lambda folder: torch.save({"weight": torch.ones(2)}, file_of_rank_1(folder)),
        UnsupportedError,
        r"has a dict, which does not say where",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_not_whole_is_an_error(fault: str, folder: Path, tmp_path: Path) -> None:
    spoil, error, text = FAULTS[fault]
    spoil(folder)
    with pytest.raises(error, match=text):
        megackpt.import_nvrx(folder, tmp_path / "imported")
    assert not check_is_distributed_checkpoint(tmp_path / "imported")


WRONG = {
    "global_offset": (5, 0),
    "global_shape": "many",
    "local_shape": (4, 4),
    "flattened_range": slice(0, 3),
    "key": 7,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_shard_whose_box_does_not_fit_its_data_is_an_error(name: str, tmp_path: Path) -> None:
    entity = mapping.ShardedTensor.from_rank_offsets("w", torch.ones(4, 3))
    kept, _ = MCoreTensorAwareStateDict.from_state_dict({"w": entity})
    setattr(kept.sharded_state_dict["w"], name, WRONG[name])
    torch.save(kept, tmp_path / "iter_0000001_0_local.pt")
    with pytest.raises(FormatError, match="in its global array is damaged, or contradicts"):
        megackpt.import_nvrx(tmp_path, tmp_path / "imported")
