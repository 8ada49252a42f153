"""What scripts save with torch.save becomes a checkpoint: full state dicts, also of several ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megackpt
from megackpt import (
    CheckpointError,
    FormatError,
    NotACheckpointError,
    UnknownClassError,
    UnsupportedError,
)
from megackpt.cli import main
from megackpt.formats.torch_dist.save import TorchDistSaveStrategy
from tests.support.effort import with_all
from tests.system.attacks import pickles
from tests.system.attacks.opcodes import zipped


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def assert_same(loaded: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):
        assert loaded.dtype == saved.dtype
        assert torch.equal(loaded, saved)
    elif isinstance(saved, dict):
        assert loaded.keys() == saved.keys()
        for key in saved:
            assert_same(loaded[key], saved[key])
    elif isinstance(saved, list):
        assert len(loaded) == len(saved)
        for ours, theirs in zip(loaded, saved, strict=True):
            assert_same(ours, theirs)
    else:
        assert loaded == saved


@pytest.mark.parametrize("form", ["file", "folder", "ranks", "kinds"])
def test_a_full_state_dict_loads_as_one_that_was_saved(form: str, tmp_path: Path) -> None:
    saved = state_of(*trained(), 7)
    source = tmp_path / "source"
    source.mkdir()
    if form == "ranks":
        for rank in range(2):
            torch.save(saved, source / f"rank_{rank}.pt")
    elif form == "kinds":
        torch.save(saved["model"], source / "model.pt")
        torch.save(saved["optimizer"], source / "optimizer.pt")
    else:
        torch.save(saved, source / "checkpoint.pt")
    report = megackpt.import_torch(
        source / "checkpoint.pt" if form == "file" else source, tmp_path / "imported"
    )
    assert report.is_verified
    assert report.left_out == ()
    if form == "kinds":
        del saved["step"]
    assert_same(megackpt.load({}, tmp_path / "imported"), saved)
    fresh = state_of(*trained(seed=1), 0)
    loaded = megackpt.load({key: fresh[key] for key in saved}, tmp_path / "imported")
    assert_same(loaded, saved)


def test_prefixes_of_wrappers_are_left_out_and_a_prefix_is_put_before_bare_weights(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({f"module.{name}": value for name, value in model.state_dict().items()}, tmp_path / "ddp.pth")
    command = ["convert", str(tmp_path / "ddp.pth"), str(tmp_path / "new"), "--from", "torch"]
    assert main([*command, "--prefix", "model."]) == 0
    assert_same(megackpt.load({}, tmp_path / "new"), {"model": model.state_dict()})


def test_a_transposed_and_a_narrowed_tensor_are_stored_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    saved = {
        "turned": base.t(),
        "part": base[1:3, 2:4],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
    }
    torch.save(saved, tmp_path / "a.pt")
    megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert_same(megackpt.load({}, tmp_path / "new"), saved)


@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
def test_formats_without_references_have_the_arrays_by_their_keys(to: str, tmp_path: Path) -> None:
    if to == "zarr":
        pytest.importorskip("tensorstore")
    saved = state_of(*trained(), 7)
    torch.save(saved, tmp_path / "a.pt")
    megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new", to)
    arrays = megackpt.load_plain_tensors(tmp_path / "new")
    assert_same(arrays["model.0.weight"], saved["model"]["0.weight"])


@pytest.mark.parametrize("way", ["save", "import_torch", "convert"])
def test_threads_that_write_files_at_the_same_time_write_their_own_tensors(way: str, tmp_path: Path) -> None:
    saved = {f"w{i}": torch.full((3 + i % 5, 4), float(i)).t() for i in range(300)}
    to = TorchDistSaveStrategy(thread_count=4)
    declared = {
        key: megackpt.ShardedTensor.from_rank_offsets(key, value.contiguous()) for key, value in saved.items()
    }
    torch.save(saved, tmp_path / "a.pt")
    megackpt.save(declared, tmp_path / "a")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads take turns within one another's statements
    try:
        if way == "save":
            megackpt.save(declared, tmp_path / "new", to)
        elif way == "import_torch":
            megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new", to)
        else:
            megackpt.convert(tmp_path / "a", tmp_path / "new", to)
    finally:
        sys.setswitchinterval(interval)
    assert_same(megackpt.load_plain_tensors(tmp_path / "new"), saved)


def test_files_of_ranks_that_differ_are_rejected_with_advice(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"model": {"weight": torch.full((3,), float(rank))}}, tmp_path / f"rank_{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"'model.weight' of rank 1 differs.*get_state_dict"):
        megackpt.import_torch(tmp_path, tmp_path / "new")
    torch.save({"model": {}}, tmp_path / "rank_1.pt")
    with pytest.raises(FormatError, match="other entries on rank 1"):
        megackpt.import_torch(tmp_path, tmp_path / "new")
    torch.save({"model": {"weight": 1}}, tmp_path / "rank_1.pt")
    with pytest.raises(
        FormatError, match=r"rank_1\.pt: 'model.weight' is a int, and a Tensor in .*rank_0\.pt"
    ):
        megackpt.import_torch(tmp_path, tmp_path / "new")
    (tmp_path / "rank_1.pt").rename(tmp_path / "rank_2.pt")
    with pytest.raises(FormatError, match=r"rank_1, of rank 1, is missing"):
        megackpt.import_torch(tmp_path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_file_and_an_empty_folder_are_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match=r"has no file of torch.save"):
        megackpt.import_torch(tmp_path / "empty", tmp_path / "new")
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", 700)
    with pytest.raises(FormatError, match=r"a\.pt: it is damaged"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(FormatError, match="it holds a list"):
        megackpt.import_torch(tmp_path / "list.pt", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("state", ["array", "value", "ranks"])
def test_a_few_bytes_that_claim_to_be_many_take_no_memory(state: str, tmp_path: Path) -> None:
    many = torch.ones(1).expand(1 << 40)
    if state == "ranks":
        (tmp_path / "a.pt").mkdir()
        for rank in range(2):
            torch.save({"a": many}, tmp_path / "a.pt" / f"rank_{rank}.pt")
    else:
        torch.save({"a": many} if state == "array" else {"a": (many,)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"'a[.0]*' repeats 4 bytes over .*Save tensor\.contiguous"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert not (tmp_path / "new").exists()


class _Starts:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_a_pickle_that_starts_a_program_is_rejected(tmp_path: Path) -> None:
    torch.save({"model": _Starts(f"touch {tmp_path / 'ran'}")}, tmp_path / "a.pt")
    with pytest.raises(UnknownClassError, match=r"posix\.system"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_a_value_that_contains_itself_is_an_error(tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.ones(2)}
    state["state"] = state
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="nested too deep"):
        megackpt.import_torch(tmp_path / "a.pt", tmp_path / "new")


@with_all("a plain run tries one that starts a program")
def test_no_crafted_pickle_gets_anywhere(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    crafted = {**pickles._makes(str(ran)), **pickles.WEIGHTS}
    rejected = 0
    for number, data in enumerate(crafted.values()):
        (tmp_path / "a.pt").write_bytes(zipped(data))
        try:
            megackpt.import_torch(tmp_path / "a.pt", tmp_path / str(number))
        except CheckpointError:
            rejected += 1
        assert not ran.exists(), list(crafted)[number]
    assert rejected > len(crafted) // 2
