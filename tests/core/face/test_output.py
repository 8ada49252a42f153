"""What commands show: checkpoints, maps and demo; one JSON document, tables to be copied, progress."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

import megackpt
from megackpt import Checkpointer, ShardedTensor
from megackpt.cli import output
from megackpt.cli.benchmark.report import Report
from megackpt.cli.entry import BAD_INPUT, FAILED_CHECK, FLAGS_OF_ALL, UNREADABLE, commands
from megackpt.cli.init import SCRIPTS
from megackpt.cli.output import ProgressBars
from megackpt.maps import family_of, known_families
from tests.support.checkpoints import FORMATS, RANKS, copy_of_saved, flip
from tests.support.command_line import CommandLine


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_arrays_objects_files_and_common_state_of_any_format_are_listed(
    tmp_path: Path, format: tuple[str, int], cli: CommandLine
) -> None:
    message = cli.json("inspect", copy_of_saved(tmp_path, format))
    assert (message["backend"], message["version"]) == format
    shown = {a["key"]: (a["dtype"], a["shape"]) for a in message["arrays"]}
    assert shown == {
        "block": ("float32", [6, 8]),
        "flat": ("float32", [6, 8]),
        "half": ("bfloat16", [3]),
        "long": ("float32", [400_000]),
        "object": ("object", [RANKS]),
    }
    assert {a["key"]: a["chunks"] for a in message["arrays"]}["object"] == RANKS
    assert message["common"]["args.betas[1]"] == "0.95"
    assert message["common"]["rng"] == "torch.int64 [4]: 0, 1, 2, 3"
    assert message["content"] == {"sharding": "'flat'"}
    nbytes = sum(a["nbytes"] for a in message["arrays"])
    assert sum(f["nbytes"] for f in message["files"]) == nbytes
    assert all((tmp_path / f["name"]).is_file() for f in message["files"])
    if format[0] != "zarr":
        assert set(message["rank_nbytes"]) == {"0", "1"}
        assert sum(message["rank_nbytes"].values()) == nbytes


def test_globs_choose_keys_and_their_files(tmp_path: Path, cli: CommandLine) -> None:
    message = cli.json("inspect", copy_of_saved(tmp_path), "--keys", "b*", "--keys", "half")
    assert [a["key"] for a in message["arrays"]] == ["block", "half"]
    assert sum(f["chunks"] for f in message["files"]) == 3
    assert sum(f["nbytes"] for f in message["files"]) == 48 * 4 + 6


def test_tensors_are_not_read_and_damage_of_common_state_is_shown(tmp_path: Path, cli: CommandLine) -> None:
    for file in sorted((copy_of_saved(tmp_path) / "data").iterdir()):
        file.unlink()
    (common,) = tmp_path.glob("common-*.json")
    flip(common, 10)
    message = cli.json("inspect", tmp_path)
    assert len(message["arrays"]) == 5
    assert common.name in message["common_error"]


def test_tables_show_what_a_person_looks_for(tmp_path: Path, cli: CommandLine) -> None:
    out = cli.out("inspect", copy_of_saved(tmp_path), "--limit", "2")
    for text in (
        "megackpt version 1",
        "saved by 2 ranks",
        "4 arrays, the first 2",
        "[6, 8]",
        "bytes by rank",
    ):
        assert text in out
    assert "long" not in out


def test_keys_are_printed_as_they_are_and_move_no_cursor(tmp_path: Path, cli: CommandLine) -> None:
    key = "a[bold]\x1b[2Jb :smile:"
    megackpt.save({"w": ShardedTensor.from_rank_offsets(key, torch.zeros(1))}, tmp_path)
    out = cli.out("inspect", tmp_path)
    assert "a[bold]\\x1b[2Jb :smile:" in out
    assert "\x1b" not in out


def test_bad_usage_and_a_missing_checkpoint_have_different_exit_codes(
    tmp_path: Path, cli: CommandLine
) -> None:
    cli.run("inspect", code=2)
    assert "is not a checkpoint" in cli.err("inspect", tmp_path, code=3)
    (index,) = copy_of_saved(tmp_path).glob("index-*")
    flip(index, -1)
    cli.run("inspect", tmp_path, code=1)
    (tmp_path / "metadata.json").write_text("[]")
    cli.run("inspect", tmp_path, code=3)
    assert "Exit codes: 0 done" in " ".join(cli.out("inspect", "-h").split())


CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "num_experts": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_every_family_is_listed_with_its_model_types(cli: CommandLine) -> None:
    listed = cli.json("maps")["families"]
    assert listed == {name: list(family.model_types) for name, family in known_families().items()}
    text = cli.out("maps")
    assert all(name in text for name in known_families())


def test_a_row_has_keys_axes_shapes_and_layers(folder: Path, cli: CommandLine) -> None:
    result = cli.json("maps", "show", "--config", folder / "config.json")
    assert result["family"] == "qwen3_moe"
    assert result["sizes"]["expert"] == 2
    assert {
        "ours": "decoder.layers.{layer}.mlp.experts.linear_fc2.weight",
        "axes": "expert h e",
        "shape": [2, 16, 12],
        "theirs": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        "their_axes": "h e",
        "their_shape": [16, 12],
        "layers": [1, 2, 3],
    } in result["rows"]


def test_the_proof_counts_all_arrays(folder: Path, cli: CommandLine) -> None:
    made = family_of(CONFIG).region_map(CONFIG)
    proved = cli.json("maps", "show", "qwen3_moe", "--config", folder)["proved"]
    assert proved == {"ours": len(made.left), "theirs": len(made.right), "pairs": len(made.pairs)}
    text = cli.out("maps", "show", "--config", folder)
    assert f"every element of {len(made.left)} arrays of ours and {len(made.right)} of qwen3_moe" in text
    assert "1-3" in text


def test_keys_of_the_first_layers_are_shown_one_by_one(folder: Path, cli: CommandLine) -> None:
    rows = cli.json("maps", "show", "--config", folder, "--layers", "2")["rows"]
    ours = {row["ours"] for row in rows}
    assert {"decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.router.weight"} <= ours
    assert not any("{layer}" in key or "layers.2." in key for key in ours)


def test_a_folder_with_fused_experts_is_shown_as_it_is(folder: Path, cli: CommandLine) -> None:
    save_file({"model.layers.1.mlp.experts.gate_up_proj": torch.ones(1)}, folder / "model.safetensors")
    rows = cli.json("maps", "show", "--config", folder)["rows"]
    (up,) = (row for row in rows if row["ours"].endswith("experts.linear_fc1.weight.up"))
    assert (up["theirs"], up["their_axes"], up["their_shape"]) == (
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        "expert e@e/2e h",
        [2, 24, 16],
    )


def test_regions_of_megatron_core_are_shown_for_the_first_layers(folder: Path, cli: CommandLine) -> None:
    result = cli.json("maps", "show", "--config", folder, "--megatron", "--layers", "2")
    assert {
        "ours": "decoder.layers.1.mlp.experts.linear_fc1.weight.up",
        "region": "[0:2, 0:12, 0:16]",
        "theirs": "decoder.layers.1.mlp.experts.experts.linear_fc1.weight",
        "their_region": "[0:2, 12:24, 0:16]",
    } in result["rows"]
    assert not any(row["ours"].startswith("decoder.layers.2.") for row in result["rows"])
    text = cli.out("maps", "show", "--config", folder, "--megatron")
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in text
    assert f"{result['proved']['theirs']} of Megatron-Core is in exactly one" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is no JSON object"),
        ('{"model_type": "llama"}', "has no num_hidden_layers"),
        ('{"model_type": "unheard"}', "No map is for model_type 'unheard'"),
    ],
)
def test_a_config_that_cannot_be_used_is_an_error(
    tmp_path: Path, text: str | None, message: str, cli: CommandLine
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert message in cli.err("maps", "show", "--config", tmp_path, code=BAD_INPUT)


def test_the_numbers_are_the_ranks_of_the_layouts(cli: CommandLine) -> None:
    result = cli.json("demo")
    assert result["equal"]
    assert result["saved"]["weight"] == [[0] * 12] * 3 + [[2] * 12] * 3
    of_tp_0 = [0] * 22 + [1] * 14  # the cut of the flat range lies within the second row
    of_tp_1 = [rank + 2 for rank in of_tp_0]
    assert [rank for row in result["saved"]["exp_avg"] for rank in row] == of_tp_0 + of_tp_1
    assert result["loaded"] == {key: [[0] * 4 + [1] * 4 + [2] * 4] * 6 for key in ("weight", "exp_avg")}


def test_the_kept_checkpoint_is_a_real_one_and_nothing_is_overwritten(
    tmp_path: Path, cli: CommandLine
) -> None:
    directory = tmp_path / "demo"
    files = cli.json("demo", "--dir", directory)["files"]
    assert {name: (directory / name).stat().st_size for name in files} == files
    assert {key: tuple(t.global_shape) for key, t in megackpt.load_tensors_metadata(directory).items()} == {
        "weight": (6, 12),
        "exp_avg": (6, 12),
    }
    assert "is not empty" in cli.err("demo", "--dir", directory, code=BAD_INPUT)


def test_the_picture_fits_a_terminal(cli: CommandLine) -> None:
    lines = cli.out("demo").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("equals what was saved" in line for line in lines)


def test_a_wrong_load_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    load = megackpt.load

    def load_all_but_one_element(state: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = load(state, *args, **kwargs)
        assert isinstance(state["weight"].data, torch.Tensor)
        state["weight"].data[0, 0] += 1
        return loaded

    monkeypatch.setattr(megackpt, "load", load_all_but_one_element)
    assert "DIFFERS" in cli.out("demo", code=FAILED_CHECK)


CALLS = {
    "bench": "--dir bench",
    "convert": "run converted --to megackpt",
    "demo": "",
    "diff": "run run",
    "gc": "run --keep-last 1",
    "init": "ddp",
    "inspect": "run",
    "ls": "run",
    "maps": "",
    "maps show": "--config config.json",
    "pin": "run 1",
    "plan": "gpt-125m --from tp1",
    "repair": "run/iter_0000002",
    "rollback": "run 2",
    "verify": "run --deep",
}
"""Arguments of a call of each command that succeeds."""


def all_commands(command: click.Command, *names: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a command that can be called, as click finds them, with their names."""
    if names and (not isinstance(command, click.Group) or command.invoke_without_command):
        yield " ".join(names), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            yield from all_commands(subcommand, *names, name)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run of two steps and a config; `bench` measures nothing."""
    with Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    machine = {"peers": {}, "load_before": 0.0, "cpus": 1, "has_cold_files": True}
    report = Report(command={"peers": []}, machine=machine, state={"nbytes": 1}, rows=())
    monkeypatch.setattr("megackpt.cli.benchmark.world.run_bench", lambda settings: report)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is drawn on stderr, which bars take for a terminal."""
    text = io.StringIO()

    def console(*, stderr: bool = False, **settings: Any) -> Console:
        shown = {"file": text, "force_terminal": True, "width": 120} if stderr else settings
        return Console(**shown)

    monkeypatch.setattr(output, "Console", console)
    return text


def test_every_command_is_called_here_and_leaves_the_flags_of_all_to_the_group() -> None:
    by_name = dict(all_commands(commands))
    assert set(by_name) == set(CALLS), "add the new command to CALLS"
    for name, command in by_name.items():
        flags = {option for parameter in command.params for option in parameter.opts}
        assert flags.isdisjoint(FLAGS_OF_ALL), name
    assert {option for parameter in commands.params for option in parameter.opts} >= set(FLAGS_OF_ALL)


def test_flags_of_all_commands_may_stand_anywhere_but_after_two_dashes(here: Path, cli: CommandLine) -> None:
    last = cli.out("pin", "run", "--json", "-q")
    assert json.loads(last)["root"] == "run"
    assert cli.out("--json", "pin", "run") == cli.out("pin", "--json", "run") == last
    assert "--json" in cli.err("pin", "--", "--json", code=UNREADABLE)


@pytest.mark.parametrize("name", CALLS)
def test_json_is_one_document_and_nothing_else_is_printed(here: Path, name: str, cli: CommandLine) -> None:
    out, err = cli.run(*name.split(), *CALLS[name].split(), "--json", "--quiet")
    assert isinstance(json.loads(out), dict)
    assert err == ""


# The ranks of a benchmark are other processes, which draw a line of their own.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"bench"}))
def test_progress_is_drawn_on_a_terminal_and_not_with_quiet(
    here: Path, name: str, terminal: io.StringIO, cli: CommandLine
) -> None:
    arguments = [*name.split(), *CALLS[name].split()]
    notes = cli.err(*arguments, code=0).count("megackpt: ")
    assert "0:00:0" in terminal.getvalue()  # seconds
    for path in here.glob("converted"):
        shutil.rmtree(path)
    drawn = terminal.getvalue()
    notes += cli.err(*arguments, "--quiet", code=0).count("megackpt: ")
    assert terminal.getvalue() == drawn
    assert notes <= 2  # only of the first


def test_flags_before_the_name_of_a_subcommand_hold_for_it(
    here: Path, terminal: io.StringIO, cli: CommandLine
) -> None:
    out = cli.out("maps", "--json", "--quiet", "show", "--config", "config.json")
    assert json.loads(out)["family"] == CONFIG["model_type"]
    assert terminal.getvalue() == ""


def test_a_bar_shows_amount_rate_and_time_left(terminal: io.StringIO) -> None:
    with ProgressBars("reading metadata") as bars:
        bars.begin("writing", 4_000_000)
        bars.advance(1_000_000)
        bars.advance(2_000_000)
        bars.begin_count("planning, ranks", 8192)
        bars.advance(8192)
    drawn = terminal.getvalue()
    assert "3.0 MB of 4.0 MB, " in drawn
    assert "B/s" in drawn
    assert " left" in drawn
    assert "8,192, " in drawn


def test_nothing_is_drawn_where_stderr_is_no_terminal() -> None:
    text = io.StringIO()
    with ProgressBars(console=Console(file=text, force_terminal=False)) as bars:
        bars.begin("writing", 4_000_000)
        bars.advance(4_000_000)
    assert text.getvalue() == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("verify nowhere", 3), ("verify --depp run", 2), ("verfy run", 2), ("ls nowhere", 3)],
)
def test_errors_are_json_too(here: Path, arguments: str, code: int, cli: CommandLine) -> None:
    out, err = cli.run(*arguments.split(), "--json", code=code)
    error = json.loads(out)["error"]
    assert set(error) == {"kind", "text", "key", "path"}
    assert error["text"] in " ".join(err.split())


def test_an_interrupted_command_prints_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(megackpt.whole.verify, "verify_checkpoint", interrupt)
    assert "megackpt: interrupted. " in cli.err("verify", "run", code=130)


KEYS = [
    "chained_0.optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "short",
    "x" * 150 + ".tail",
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in KEYS}
    megackpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def test_on_a_terminal_keys_wrap_at_dots_and_follow_in_full(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", cli.out("inspect", checkpoint)).splitlines()
    in_full = [line.rstrip() for line in lines if line.rstrip() in KEYS]
    assert in_full == sorted([KEYS[0], KEYS[2]])
    assert all(len(line.rstrip()) <= 80 for line in lines if line.rstrip() not in KEYS)
    parts = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    first = parts.index(next(part for part in parts if part.startswith("chained_0.")))
    wrapped = parts[first : first + 8]
    while "".join(wrapped) != KEYS[0]:
        wrapped.pop()
    assert len(wrapped) > 1
    assert all(part.endswith(".") for part in wrapped[:-1])


def test_in_a_pipe_each_row_is_a_line(checkpoint: Path, cli: CommandLine) -> None:
    lines = cli.out("inspect", checkpoint).splitlines()
    for key in KEYS:
        assert len([line for line in lines if f" {key} " in line]) == 1


@pytest.mark.parametrize("kind", sorted(SCRIPTS))
def test_a_script_is_short_and_compiles_and_replaces_no_file(
    kind: str, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run("init", kind)
    text = (tmp_path / f"train_{kind}.py").read_text()
    compile(text, kind, "exec")
    assert len(text.splitlines()) < 90
    assert f"train_{kind}.py run 100" in text
    (tmp_path / f"train_{kind}.py").write_text("mine")
    assert "exists, and is not changed" in cli.err("init", kind, code=2)
    assert (tmp_path / f"train_{kind}.py").read_text() == "mine"
