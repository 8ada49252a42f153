"""Folders and files of other tools are checkpoints as they are: loaded, inspected, compared and verified."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import FormatError, IntegrityError, NotACheckpointError, StorageError
from megackpt.cli import main
from megackpt.formats.folder_kinds import recognise_names
from megackpt.run import check_is_distributed_checkpoint
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from megackpt.whole import CopyReport
from tests.support.states import sharded

CONTRIB = Path(__file__).parents[2] / "contrib"


@dataclass(frozen=True)
class Folder:
    """What a tool has written, and what reads it."""

    backend: str  # name of its format
    make: Callable[[Path], Any]  # writes it to a path
    imported: Callable[..., CopyReport]  # makes a checkpoint of it
    damaged: str = ""  # the file of it whose bytes are changed
    left_out: bool = field(default=False)  # whether something in it cannot be loaded


def _state(offset: float = 0.0) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    weights = {name: value.detach() + offset for name, value in model.state_dict().items()}
    return {"model": weights, "rates": [0.1, 0.2], "step": 3}


def _ranks(path: Path) -> None:
    path.mkdir()
    for rank in range(2):
        torch.save(_state(), path / f"model_{rank}.pt")


FOLDERS = {
    "a file of torch.save": Folder("torch", lambda p: torch.save(_state(), p), megackpt.import_torch),
    "files of ranks": Folder("torch", _ranks, megackpt.import_torch, "model_1.pt"),
    "deepspeed": Folder(
        "deepspeed",
        lambda p: shutil.copytree(CONTRIB / "deepspeed" / "folders" / "zero2", p),
        megackpt.import_deepspeed,
        "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        left_out=True,
    ),
    "nvrx": Folder(
        "nvrx",
        lambda p: shutil.copytree(CONTRIB / "nvrx" / "folders" / "atomic", p),
        megackpt.import_nvrx,
        left_out=True,
    ),
}


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest) -> Folder:
    return FOLDERS[request.param]


@pytest.fixture
def source(folder: Folder, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    folder.make(path)
    if path.is_file():
        path = path.rename(path.with_suffix(".pt"))
    return path


def test_it_is_what_its_import_makes_of_it(folder: Folder, source: Path, tmp_path: Path) -> None:
    report = folder.imported(source, tmp_path / "imported")
    copied = megackpt.convert(source, tmp_path / "copied", "megackpt")
    assert copied.is_verified
    assert (copied.arrays, copied.origin, copied.left_out) == (report.arrays, report.origin, report.left_out)
    for name in ("imported", "copied"):
        assert megackpt.diff(source, tmp_path / name).is_equal, name
    summary, expected = megackpt.inspect(source), megackpt.inspect(tmp_path / "imported")
    assert summary.backend == folder.backend
    assert [(a.key, a.dtype, a.shape) for a in summary.arrays] == [
        (a.key, a.dtype, a.shape) for a in expected.arrays
    ]
    assert (summary.common, summary.content) == (expected.common, expected.content)
    assert bool(summary.left_out) == folder.left_out
    loaded, imported = (megackpt.load_plain_tensors(p) for p in (source, tmp_path / "imported"))
    assert loaded.keys() == imported.keys() != set()
    assert all(torch.equal(loaded[key], imported[key]) for key in loaded)


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_loads_at_any_layout(folder: Folder, source: Path, ranks: int, caplog: Any) -> None:
    whole = megackpt.load_plain_tensors(source)

    def run(group: SimulatedRank) -> None:
        wanted = {}
        for key, tensor in whole.items():
            if tensor.dim() and tensor.shape[0] % ranks == 0:
                part = torch.zeros_like(tensor.chunk(ranks)[group.rank])
                wanted[key] = sharded(key, part, (0, group.rank, ranks))
            else:
                copy = torch.zeros_like(tensor)
                wanted[key] = sharded(key, copy, replica_id=group.rank)
        loaded = megackpt.load(wanted, source, group=group)
        for key, tensor in whole.items():
            is_cut = tensor.dim() and tensor.shape[0] % ranks == 0
            assert torch.equal(loaded[key], tensor.chunk(ranks)[group.rank] if is_cut else tensor), key

    caplog.clear()
    with caplog.at_level(logging.WARNING):
        SimulatedWorld(ranks).run(run)
    texts = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(texts) == folder.left_out


def test_ranks_divide_a_copy_of_it(source: Path, tmp_path: Path) -> None:
    reports = SimulatedWorld(2).run(lambda g: megackpt.convert(source, tmp_path / "copy", "zarr", group=g))
    assert reports[0] == reports[1]
    assert set(megackpt.load_plain_tensors(tmp_path / "copy")) == set(megackpt.load_plain_tensors(source))


class WhileCopied:
    """A `Progress` that does something when the first bytes have been copied."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    def begin(self, doing: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        act, self._act = self._act, lambda: None
        act()


@pytest.mark.parametrize("change", ["another time", "another file", "lost"])
def test_a_source_that_changes_while_it_is_copied_replaces_no_checkpoint(
    folder: Folder, source: Path, change: str, tmp_path: Path
) -> None:
    file = source if source.is_file() else max(source.rglob("*.pt"))

    def act() -> None:
        if change == "another time":
            os.utime(file, ns=(0, 0))  # not its bytes: a mapped file that is cut short ends the process
        elif change == "another file":
            shutil.copy(file, tmp_path / "other")
            (tmp_path / "other").replace(file)
        else:
            file.unlink()

    megackpt.save({"step": 1}, tmp_path / "copy")  # which stays
    with pytest.raises(IntegrityError, match=r"changed while it was read"):
        megackpt.convert(source, tmp_path / "copy", "megackpt", overwrite=True, progress=WhileCopied(act))
    assert megackpt.load({}, tmp_path / "copy") == {"step": 1}
    assert megackpt.verify(tmp_path / "copy", deep=True).is_whole


def test_verify_finds_a_changed_byte(folder: Folder, source: Path) -> None:
    assert megackpt.verify(source).damages == ()
    assert megackpt.verify(source, deep=True).is_whole
    file = source / folder.damaged if folder.damaged else source
    if file.is_dir():
        file = max(file.rglob("*_local.pt"))
    data = bytearray(file.read_bytes())
    data[torch.PyTorchFileReader(str(file)).get_record_offset("data/0")] ^= 0x10
    file.write_bytes(data)
    damages = megackpt.verify(source, deep=True).damages
    assert damages
    assert {Path(damage.file).name for damage in damages} <= {file.name, ""}


def test_a_file_of_torch_save_may_have_any_name_but_holds_a_dict(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "weights.model")
    assert megackpt.inspect(tmp_path / "weights.model").backend == "torch"
    torch.save(torch.nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(
        FormatError, match=r"holds an object of torch\.nn.*Linear, and a checkpoint is a dict"
    ):
        megackpt.inspect(tmp_path / "whole.pt")


def test_a_file_in_the_root_of_a_run_is_not_taken_for_the_run(tmp_path: Path, capsys: Any) -> None:
    megackpt.save({"step": 1}, tmp_path / "run" / "iter_0000001")
    torch.save(_state(), tmp_path / "run" / "args.pt")
    with pytest.raises(NotACheckpointError):
        megackpt.load({}, tmp_path / "run")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "new"), "--to", "zarr"]) == 0
    assert megackpt.load_common_state_dict(tmp_path / "new") == {"step": 1}


def test_bytes_without_checksums_are_not_called_whole(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    report = megackpt.verify(tmp_path / "old.pt", deep=True)
    assert (report.damages, report.is_whole, report.unchecked_nbytes) == ((), None, report.nbytes)


def test_the_commands_take_it_as_it_is(folder: Folder, source: Path, tmp_path: Path, capsys: Any) -> None:
    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    copied = json.loads(run("convert", str(source), str(tmp_path / "copy"), "--json"))
    assert (copied["backend"], copied["is_verified"]) == ("megackpt", True)
    run("convert", str(source), str(tmp_path / "checked"), "--from", folder.backend, "--to", "zarr")
    assert json.loads(run("inspect", str(source), "--json"))["backend"] == folder.backend
    run("verify", str(source), "--deep")
    run("diff", str(source), str(tmp_path / "copy"))


def test_a_folder_with_such_files_is_free_for_a_save_and_no_step(source: Path) -> None:
    if source.is_dir():
        assert not check_is_distributed_checkpoint(source)
        megackpt.save({"step": 1}, source)
        assert megackpt.load({}, source) == {"step": 1}


def test_files_that_an_unfinished_save_left_are_no_folder_of_another_tool(tmp_path: Path) -> None:
    weight = sharded("w", torch.ones(3))
    megackpt.save({"w": weight, "step": 1}, tmp_path / "c", "torch_dist")
    for name in ("metadata.json", ".metadata"):
        os.remove(tmp_path / "c" / name)
    with pytest.raises(NotACheckpointError, match=r"the save did not finish"):
        megackpt.load({}, tmp_path / "c")
    text = tmp_path / "notes.md"
    text.write_text("no checkpoint")
    with pytest.raises(StorageError, match=r"notes\.md is a file where a directory is needed"):
        megackpt.inspect(text)


@pytest.mark.parametrize(
    ("names", "kind", "advice"),
    [
        (["weights/.metadata", "context/model.yaml"], "a checkpoint of NeMo", "x/weights"),
        (["model.nemo"], "an archive of NeMo", "unpack it"),
        ([f"blobs/{40 * 'a'}", "refs/main"], "in the cache of Hugging Face", "x/snapshots/REVISION"),
        (["saved_model.pb"], "a checkpoint of TensorFlow", "It is not read"),
        (
            ["trainer_state.json", "global_step8/mp_rank_00_model_states.pt"],
            "Trainer under DeepSpeed",
            "x/global_step8 with `megackpt convert`",
        ),
        (
            ["trainer_state.json", "pytorch_model_fsdp_0/.metadata"],
            "Trainer under FSDP",
            "x/pytorch_model_fsdp_0",
        ),
        (["step-9/.metadata", "step-10/.metadata"], "a folder with checkpoints in it", "x/step-10"),
        (
            ["checkpoint-9/trainer_state.json", "checkpoint-10/trainer_state.json"],
            "a run of",
            "/checkpoint-10;",
        ),
        (["iter_0000009/metadata.json", "iter_0000010/metadata.json"], "the root of a run", "/iter_0000010"),
    ],
)
def test_kinds_are_recognised_by_names_of_files(names: list[str], kind: str, advice: str) -> None:
    seen = recognise_names(names, where="x")
    assert seen is not None
    assert kind in seen.name
    assert advice in seen.advice


def test_names_that_no_kind_has_are_not_recognised() -> None:
    assert recognise_names(["notes.md", "data/x.bin.txt", "mp_rank_00.json"], where="x") is None
