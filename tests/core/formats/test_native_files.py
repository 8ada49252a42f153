"""What the files of the native format are, and that a reader ignores what a newer version may add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.numpy
import torch

from megackpt import SaveOptions, ShardedObject, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.storage.digests import digest_of
from megackpt.testing.world import SimulatedWorld


def state_of(rank: int, fill: float) -> dict[str, Any]:
    rows = ShardedTensor.from_rank_offsets("rows", torch.full((2, 3), fill), (0, rank, 2))
    loader = ShardedObject("loader", {"seen": (1, torch.ones(2))}, (2,), (rank,))
    return {"rows": rows, "loader": loader, "step": 7, "noise": torch.tensor(3.0), "names": {"a", "b"}}


def save_all(directory: Path) -> None:
    def save_rank(group: Group) -> None:
        save(state_of(group.rank, 1.0), directory, options=SaveOptions(parity=2), group=group)

    SimulatedWorld(2).run(save_rank)


def test_no_file_of_a_save_is_a_pickle(tmp_path: Path) -> None:
    """Each file is JSON or safetensors, and so is each object in a file."""
    save_all(tmp_path)
    kinds = set()
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        kinds.add((path.relative_to(tmp_path).parts[0].partition("-")[0], path.suffix))
        if path.suffix == ".json":
            assert json.loads(path.read_text())
            continue
        for name, column in safetensors.numpy.load(path.read_bytes()).items():
            if name.startswith("loader"):
                assert set(safetensors.numpy.load(column.tobytes())) == {"0"}
    assert kinds == {
        ("metadata.json", ".json"), ("common", ".json"), ("common", ".safetensors"),
        ("index", ".safetensors"), ("data", ".safetensors"), ("parity", ".json"), ("parity", ".safetensors"),
    }  # fmt: skip


def test_fields_and_columns_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    save_all(tmp_path)
    commit = tmp_path / "metadata.json"
    manifest = json.loads(commit.read_text()) | {"of_a_newer_version": {"any": [1]}}
    commit.write_text(json.dumps(manifest))
    check_load(tmp_path)  # by the head of the index

    index = tmp_path / manifest["index"]["file"]
    columns = safetensors.numpy.load(index.read_bytes())
    columns["of_a_newer_version"] = columns["nbytes"]
    written = safetensors.numpy.save(columns)
    index.write_bytes(written)
    entry = {"file": index.name, "nbytes": len(written), "xxh3_128": digest_of(written)}
    commit.write_text(json.dumps(manifest | {"index": entry}))
    check_load(tmp_path)


def check_load(directory: Path) -> None:
    def load_rank(group: Group) -> dict[str, Any]:
        return load(state_of(group.rank, 0.0), directory, group=group)

    for loaded in SimulatedWorld(2).run(load_rank):
        assert (loaded["rows"].tolist(), loaded["step"]) == ([[1.0] * 3] * 2, 7)
        assert loaded["loader"]["seen"][0] == 1
