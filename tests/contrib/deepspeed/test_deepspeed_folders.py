"""Folders that DeepSpeed's ZeRO saved become checkpoints: every array bit for bit as its ranks had it.

`folders/` is what `deepspeed_program.py` wrote with DeepSpeed 0.19.8. With the extra `test-deepspeed`
installed, the folders are made anew.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megackpt
from megackpt import FormatError, NotACheckpointError
from megackpt.cli import main
from megackpt.codec import ForeignMember
from megackpt.errors import UnknownClassError, UnsupportedError
from megackpt.formats.foreign import deepspeed
from megackpt.formats.foreign.state import MASTER
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    ColumnParallelLinear,
    ParallelGroups,
    ParallelLayout,
    RowParallelLinear,
    ShardedModule,
    VocabParallelEmbedding,
)
from tests.contrib.deepspeed.deepspeed_program import (
    CASES,
    LEARNING_RATE,
    MORE_STEPS,
    STATES,
    STEPS,
    Net,
    batch,
    mean_square,
)
from tests.support.effort import sampled
from tests.support.states import PickledCall
from tests.system.examples.command_line import TIMEOUT_S, quiet, torchrun

STORED = Path(__file__).parent / "folders"
OPTIMIZER_0 = "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIMIZER_1 = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "global_step3/mp_rank_00_model_states.pt"
TWICE = "are of one rank, and one of them would be left"


def check_arrays(folders: Path, case: str, target: Path) -> None:
    """Import the folder of a case, and compare every array."""
    report = megackpt.import_deepspeed(folders / case, target)
    assert report.is_verified
    arrays = megackpt.load_plain_tensors(target)
    truth = torch.load(folders / f"{case}.truth.pt")["states"]
    dtype = torch.bfloat16 if "bf16" in CASES[case] else torch.float32
    expected = {"head.weight": truth["emb.weight"]["fp32_param"].to(dtype)}
    for name, states in truth.items():
        expected |= {f"optimizer.state.{state}.{name}": value for state, value in states.items()}
        expected[f"optimizer.state.step.{name}"] = torch.tensor(float(STEPS))
        expected[f"optimizer.param_group.{name}"] = torch.tensor(0 if states["exp_avg"].dim() > 1 else 1)
        expected[name] = states["fp32_param"].to(dtype)
    torch.manual_seed(0)
    untrained = Net()  # as it was made in the run
    expected |= {f"frozen.{name}": p.detach().to(dtype) for name, p in untrained.frozen.named_parameters()}
    expected |= dict(untrained.named_buffers())
    assert arrays.keys() == expected.keys()
    for key, value in expected.items():
        assert arrays[key].dtype == value.dtype, key
        assert torch.equal(arrays[key], value), key


@sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_every_array_is_bit_equal_with_what_the_ranks_had(case: str, tmp_path: Path) -> None:
    check_arrays(STORED, case, tmp_path / "imported")


def test_folders_that_deepspeed_makes_now_are_bit_equal(tmp_path: Path) -> None:
    if importlib.util.find_spec("deepspeed") is None:  # to import it takes seconds
        pytest.skip("the extra test-deepspeed is not installed")
    program = torchrun(2, Path(__file__).with_name("deepspeed_program.py"), tmp_path)
    environment = quiet({"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
    subprocess.run(program, check=True, env=environment, timeout=TIMEOUT_S, capture_output=True)
    for case in CASES:
        check_arrays(tmp_path, case, tmp_path / "imported" / case)


def test_the_rest_of_the_run_is_common_state(tmp_path: Path) -> None:
    report = megackpt.import_deepspeed(STORED / "zero2", tmp_path / "imported")
    common = megackpt.load_common_state_dict(tmp_path / "imported")
    assert common["deepspeed"]["global_steps"] == STEPS
    assert common["deepspeed"]["client_state"] == {"epoch": 5}
    name = f"{PosixPath.__module__}.PosixPath"  # which depends on the version of Python
    assert report.left_out == (f"deepspeed.client_state.path (an object of {name})",)
    assert common["optimizer"]["param_groups"]["0"]["lr"] == LEARNING_RATE
    assert [group["weight_decay"] for group in common["optimizer"]["param_groups"].values()] == [0.1, 0.0]
    assert megackpt.load_content_metadata(tmp_path / "imported") == {"imported_from": report.origin}
    assert report.origin == "DeepSpeed 0.19.8, ZeRO-2, 2 ranks"


@sampled(4)
@pytest.mark.parametrize("case", ["zero1", "zero3_bf16"])
def test_torch_names_load_into_a_plain_model_and_optimizer(case: str, tmp_path: Path) -> None:
    from megackpt.contrib.torch_state import TorchState

    megackpt.import_deepspeed(STORED / case, tmp_path / "imported", keys="torch", weights="masters")
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() == 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    state = TorchState([model], [optimizer])
    loaded = megackpt.load(state.sharded_state_dict(), tmp_path / "imported")
    state.load_models(loaded)
    state.load_optimizers(loaded)
    truth = torch.load(STORED / f"{case}.truth.pt")["states"]
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert torch.equal(param, truth[name]["fp32_param"])
            for kind in STATES:
                assert torch.equal(optimizer.state[param][kind], truth[name][kind])
            assert optimizer.state[param]["step"] == STEPS
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def _flip(folder: Path) -> None:
    """Change a byte of a tensor, which torch.load does not see."""
    path = folder / OPTIMIZER_1
    with zipfile.ZipFile(path) as archive:
        record = next(r for r in archive.infolist() if r.filename.endswith("/data/0"))
    data = bytearray(path.read_bytes())
    data[record.header_offset + 200] ^= 1
    path.write_bytes(data)


def _too_short(folder: Path) -> None:
    state = torch.load(folder / OPTIMIZER_0, weights_only=False, pickle_module=_NoClasses)
    groups = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:5]
    state["optimizer_state_dict"] = {
        k: state["optimizer_state_dict"][k]
        for k in ("base_optimizer_state", "single_partition_of_fp32_groups", "partition_count")
    }
    torch.save(state, folder / OPTIMIZER_0)


class _NoClasses:
    """A pickle module whose classes of DeepSpeed are empty."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if module.startswith("deepspeed"):
                return type(name, (), {"__init__": lambda self, *args: None})
            return super().find_class(module, name)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _universal(folder: Path) -> None:
    """Leave what ds_to_universal.py writes: the model's file, and a folder for each parameter."""
    step = folder / "global_step3_universal"
    (step / "zero" / "fc1.weight").mkdir(parents=True)
    torch.save({"param": torch.ones(10, 6)}, step / "zero" / "fc1.weight" / "fp32.pt")
    shutil.move(folder / MODEL, step)
    shutil.rmtree(folder / "global_step3")
    (folder / "latest").write_text(step.name)


def _copy(file: str, name: str) -> Callable[[Path], object]:
    """Return what puts a copy of a file next to it."""
    return lambda folder: shutil.copy(folder / file, (folder / file).with_name(name))


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "lost": (lambda f: (f / OPTIMIZER_1).unlink(), FormatError, "2 ranks, and has the optimizer files of 1"),
    "first lost": (lambda f: (f / OPTIMIZER_0).unlink(), FormatError, f"{Path(OPTIMIZER_0).name} is missing"),
    "no model": (lambda f: (f / MODEL).unlink(), NotACheckpointError, r"no '\*_model_states.pt'"),
    "no latest": (lambda f: (f / "latest").unlink(), NotACheckpointError, "which has a file 'latest'"),
    "cut": (lambda f: _cut(f / OPTIMIZER_1), FormatError, "it is damaged"),
    "flipped": (_flip, FormatError, "are not those written"),
    "elsewhere": (
        lambda f: (f / "latest").write_text("../../other"),
        FormatError,
        "is not the name of a folder",
    ),
    "other": (lambda f: torch.save({"model": {}}, f / OPTIMIZER_0), FormatError, "no 'optimizer_state_dict'"),
    "short": (_too_short, FormatError, "do not have the layout of ZeRO"),
    "rank 1 twice": (_copy(OPTIMIZER_1, f"bf16_{Path(OPTIMIZER_1).name}"), FormatError, TWICE),
    "rank 01": (_copy(OPTIMIZER_1, "zero_pp_rank_01_mp_rank_00_optim_states.pt"), FormatError, TWICE),
    "a rank like a time": (
        _copy(OPTIMIZER_1, "zero_pp_rank_1764115200_mp_rank_00_optim_states.pt"),
        FormatError,
        "zero_pp_rank_2_mp_rank_00_optim_.* missing",
    ),
    "model ranks": (_copy(MODEL, "mp_rank_01_model_states.pt"), UnsupportedError, "ds_to_universal"),
    "layers": (_copy(MODEL, "layer_00-model_00-model_states.pt"), UnsupportedError, "ds_to_universal"),
    "universal": (_universal, UnsupportedError, "is a universal checkpoint of DeepSpeed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_folder_that_is_damaged_or_of_another_kind_is_one_error_and_nothing_is_written(
    name: str, tmp_path: Path
) -> None:
    damage, error, words = DAMAGES[name]
    shutil.copytree(STORED / "zero2", tmp_path / "folder")
    damage(tmp_path / "folder")
    with pytest.raises(error, match=words) as raised:
        megackpt.import_deepspeed(tmp_path / "folder", tmp_path / "imported")
    assert str(tmp_path / "folder") in str(raised.value)
    assert not (tmp_path / "imported").exists()


def test_a_weight_that_is_no_number_is_that_of_a_master_that_is_none() -> None:
    path = str(STORED / "zero1")
    state = deepspeed.read_deepspeed(path, checks_bytes=False)  # its memory is a copy on write
    name, param = next(iter(state.params.items()))
    step = deepspeed._Step("the folder", (), ())
    param.states[MASTER][0][0] = torch.nan
    with pytest.raises(FormatError, match=f"'{name}' is not its master"):
        step.check_masters(state)
    state.weights[name].parts[0].view(-1)[0] = torch.nan
    step.check_masters(state)


@pytest.mark.parametrize(("name", "value", "stage"), [("gradients", None, "2"), (None, 1, "1")])
def test_the_stage_is_that_of_a_member_by_name_or_by_value(
    name: str | None, value: int | None, stage: str
) -> None:
    """Python 3.11.0 to 3.11.3 stores members of enumerations by their names."""
    member = ForeignMember("deepspeed.runtime.zero.config", "ZeroStageEnum", name, value)
    assert deepspeed._Step("the folder", (), ({"zero_stage": member},))._stage() == stage


Shapes = dict[str, Any]


def _first_changed(shapes: Shapes, change: Callable[[torch.Size], object]) -> Shapes:
    name = next(iter(shapes))
    return {**shapes, name: change(shapes[name])}


CHANGES: dict[str, Callable[[Shapes], Shapes]] = {
    "reordered": lambda shapes: dict(reversed(shapes.items())),
    "turned": lambda shapes: {name: torch.Size(reversed(shape)) for name, shape in shapes.items()},
    "shortened": lambda shapes: _first_changed(shapes, lambda s: torch.Size((s[0] - 1, *s[1:]))),
    "without the last": lambda shapes: dict(list(shapes.items())[:-1]),
    "negative": lambda shapes: _first_changed(shapes, lambda s: tuple(-extent for extent in s)),
}


def _change_shapes(model: Path, change: str) -> None:
    """Change the shapes of parameters that a rank's file of the model names."""
    state = torch.load(model, weights_only=False)
    state["param_shapes"] = [type(of)(CHANGES[change](of)) for of in state["param_shapes"]]
    torch.save(state, model)


# ZeRO-3 has no file with a whole weight, so that an order or a shape of as many elements is believed.
CONTRADICTIONS = [
    (case, change)
    for case in ("zero1", "zero1_bf16", "zero2", "bf16_optimizer", "zero3", "zero3_bf16")
    for change in (*CHANGES, "a copied file")
    if not case.startswith("zero3") or change not in ("reordered", "turned")
]


@pytest.mark.parametrize(("case", "change"), CONTRADICTIONS)
def test_shapes_or_files_that_are_not_those_of_the_values_are_an_error(
    case: str, change: str, tmp_path: Path
) -> None:
    """The masters would be those of other parameters, and nothing else in the files shows it."""
    folder = tmp_path / case
    shutil.copytree(STORED / case, folder)
    if change == "a copied file":
        optimizers = sorted(folder.rglob("*optim_states.pt"))
        shutil.copy(optimizers[0], optimizers[1])
    else:
        for model in folder.rglob("*model_states.pt"):
            _change_shapes(model, change)
    texts = r"is not its master|do not have the layout of ZeRO|is a copy of another"
    with pytest.raises(FormatError, match=texts):
        megackpt.import_deepspeed(folder, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_ranks_whose_files_name_other_shapes_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "zero3"
    shutil.copytree(STORED / "zero3", folder)
    _change_shapes(max(folder.rglob("*model_states.pt")), "reordered")
    with pytest.raises(FormatError, match="ranks have other shapes of parameters, or in another order"):
        megackpt.import_deepspeed(folder, tmp_path / "new")


def test_the_command_imports_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "imported"
    convert = ["convert", str(STORED / "zero3"), str(target), "--from", "deepspeed"]
    assert main([*convert, "--prefix", "net."]) == 0
    assert "from DeepSpeed 0.19.8, ZeRO-3, 2 ranks" in capsys.readouterr().out
    assert "optimizer.state.exp_avg.net.fc1.weight" in megackpt.load_plain_tensors(target)
    assert main([*convert, "--map", "llama"]) == 2
    assert main(["convert", str(tmp_path), str(tmp_path / "b"), "--from", "deepspeed"]) == 3


def _with_attack(directory: Path, function: Callable[[str], object], argument: str) -> Path:
    """Return a folder whose model file has an attack among the values of the user."""
    shutil.copytree(STORED / "zero2", directory / "folder")
    state = torch.load(directory / "folder" / MODEL, weights_only=False)
    state["mine"] = {"attack": PickledCall(function, argument), "kept": 1}
    torch.save(state, directory / "folder" / MODEL)
    return directory / "folder"


def test_a_pickle_that_starts_a_program_is_rejected(tmp_path: Path) -> None:
    folder = _with_attack(tmp_path, os.system, f"touch {tmp_path / 'ran'}")
    with pytest.raises(UnknownClassError, match=r"posix\.system.*Nothing was run"):
        megackpt.import_deepspeed(folder, tmp_path / "imported")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "imported").exists()


def test_an_object_of_another_class_is_left_out_and_never_made(tmp_path: Path) -> None:
    folder = _with_attack(tmp_path, eval, f"open({str(tmp_path / 'ran')!r}, 'w')")
    report = megackpt.import_deepspeed(folder, tmp_path / "imported")
    assert not (tmp_path / "ran").exists()
    assert "deepspeed.client_state.mine.attack (an object of builtins.eval)" in report.left_out
    kept = megackpt.load_common_state_dict(tmp_path / "imported")["deepspeed"]["client_state"]
    assert kept == {"epoch": 5, "mine": {"kept": 1}}


def test_chunks_are_cut_so_that_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megackpt.whole import copy_source

    monkeypatch.setattr(copy_source, "COPIED_BYTES", 64)
    check_arrays(STORED, "zero3_bf16", tmp_path / "imported")


OF_A_STEP = 1e-3


class ParallelNet(ShardedModule):
    """The model of `tests.contrib.deepspeed.deepspeed_program`, of parallel layers with the same names."""

    def __init__(self, groups: ParallelGroups) -> None:
        super().__init__(groups)
        self.emb = VocabParallelEmbedding(12, 6, groups, make_divisible=1)
        self.fc1 = ColumnParallelLinear(6, 10, groups)
        self.fc2 = RowParallelLinear(10, 6, groups)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.frozen(self.fc2(torch.relu(self.fc1(self.emb(tokens)))))
        return hidden


def _resumed(directory: Path) -> None:
    """Load a checkpoint, save it again as it was loaded, train, and save the result."""
    groups = ParallelGroups.create(ParallelLayout(tp=2, dp=2))
    model = ParallelNet(groups)
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.0}
    others = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.5}  # stored: another one
    optimizer = DistributedOptimizer([decayed, others], lambda g: torch.optim.AdamW(g, lr=1.0), groups)

    def declared() -> dict[str, object]:
        state = model.sharded_state_dict()
        return {"model": state, "optimizer": optimizer.sharded_state_dict(state)}

    loaded = megackpt.load(declared(), directory / "imported")
    model.load_state_dict(loaded["model"], strict=False)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    megackpt.save(declared(), directory / "loaded")
    for step in range(STEPS, STEPS + MORE_STEPS):
        optimizer.zero_grad()
        tokens, target = batch(groups.dp.rank, step)
        mean_square(model(tokens), target).backward()
        optimizer.step()
    megackpt.save(declared(), directory / "trained")


@sampled(6)
@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3_subgroups"])
def test_training_goes_on_at_tp2_dp2(case: str, rank_pool: RankPool, tmp_path: Path) -> None:
    megackpt.import_deepspeed(STORED / case, tmp_path / "imported")
    rank_pool.run(_resumed, 4, tmp_path)
    truth = torch.load(STORED / f"{case}.truth.pt")
    loaded = megackpt.load_plain_tensors(tmp_path / "loaded")
    trained = megackpt.load_plain_tensors(tmp_path / "trained")
    for name, states in truth["states"].items():
        assert torch.equal(loaded[name], states["fp32_param"])
        for state in STATES:
            assert torch.equal(loaded[f"optimizer.state.{state}.{name}"], states[state])
        assert loaded[f"optimizer.state.step.{name}"] == STEPS
        moved = (trained[name] - truth["after"][name]).abs().max()
        assert moved <= OF_A_STEP * LEARNING_RATE, name
        assert (trained[name] - loaded[name]).abs().max() > 0.1 * LEARNING_RATE
