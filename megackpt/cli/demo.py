"""`megackpt demo`: a checkpoint saved by four ranks and loaded by three, in one process, with a picture."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megackpt.cli.entry import EPILOG, FAILED_CHECK, print_json, wants_json
from megackpt.cli.locations import LocalPath
from megackpt.cli.output import ProgressBars, show
from megackpt.errors import DeclarationError
from megackpt.storage import is_url

if TYPE_CHECKING:
    import torch

    from megackpt.comm import Group
    from megackpt.entities import ShardedTensor

    State: TypeAlias = dict[str, ShardedTensor]
    RankOfElement: TypeAlias = list[list[int]]  # [ROWS][COLUMNS]

ROWS, COLUMNS = 6, 12
TP_OF_SAVE, DP_OF_SAVE = 2, 2
TP_OF_LOAD = 3
_COLOURS = ("white on blue", "black on green", "white on magenta", "black on yellow")


@click.command(name="demo", epilog=EPILOG)
@click.option("--dir", "directory", type=LocalPath(file_okay=False), help="Keep the checkpoint in DIRECTORY.")
def command(directory: str | None) -> int:
    """Save a checkpoint at one layout and load it at another, in seconds.

    Ranks are threads of this process, so that nothing has to be started. They call megackpt.save and
    megackpt.load, as the processes of a job do.
    """
    if directory is not None and Path(directory).is_dir() and any(Path(directory).iterdir()):
        raise DeclarationError(f"{directory} is not empty. Name a directory that is new, or empty.")
    if directory is not None and is_url(directory):
        raise DeclarationError(f"{directory} is a URL. Name a directory of this machine.", path=directory)
    temporary = nullcontext(directory) if directory else tempfile.TemporaryDirectory()
    with temporary as path, ProgressBars("saving and loading"):
        result = _save_and_load(Path(path))
    if wants_json():
        print_json(result)
    else:
        _show(result, directory)
    return 0 if result["equal"] else FAILED_CHECK


def _save_and_load(path: Path) -> dict[str, Any]:
    import torch

    import megackpt
    from megackpt.testing.world import SimulatedWorld

    arrays = {"weight": torch.rand(ROWS, COLUMNS), "exp_avg": torch.rand(ROWS, COLUMNS)}

    def save(group: Group) -> State:
        state = _state_of_saving_rank(group.rank, **arrays)
        megackpt.save(state, path, group=group)
        return state

    def load(group: Group) -> State:
        state = _state_of_loading_rank(group.rank)
        megackpt.load(state, path, group=group)
        return state

    saved = SimulatedWorld(TP_OF_SAVE * DP_OF_SAVE).run(save)
    files = {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*.*"))}
    loaded = SimulatedWorld(TP_OF_LOAD).run(load)
    return {
        "saved": {key: _ranks_of_elements(saved, key) for key in arrays},
        "files": files,
        "loaded": {key: _ranks_of_elements(loaded, key) for key in arrays},
        "equal": all(_are_equal(state, arrays) for state in loaded),
    }


def _state_of_saving_rank(rank: int, weight: torch.Tensor, exp_avg: torch.Tensor) -> State:
    """Declare rows of the weight, equal on the ranks of dp, and this rank's share of the moment of them."""
    from megackpt.entities import ShardedTensor

    tp_rank, dp_rank = divmod(rank, DP_OF_SAVE)
    rows = (0, tp_rank, TP_OF_SAVE)  # axis, position, number of parts
    local_weight = weight.chunk(TP_OF_SAVE)[tp_rank].clone()
    local_moment = exp_avg.chunk(TP_OF_SAVE)[tp_rank].flatten()
    # Not a multiple of a row: the cut of a distributed optimizer goes through the middle of one.
    cut = local_moment.numel() // DP_OF_SAVE + COLUMNS // 3
    share = slice(0, cut) if dp_rank == 0 else slice(cut, local_moment.numel())
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", local_weight, rows, replica_id=dp_rank),
        "exp_avg": ShardedTensor.from_rank_offsets_flat(
            "exp_avg", local_moment[share].clone(), local_weight.shape, rows, flattened_range=share
        ),
    }


def _state_of_loading_rank(rank: int) -> State:
    """Ask for columns of both arrays."""
    import torch

    from megackpt.entities import ShardedTensor

    columns = (1, rank, TP_OF_LOAD)
    return {
        key: ShardedTensor.from_rank_offsets(key, torch.empty(ROWS, COLUMNS // TP_OF_LOAD), columns)
        for key in ("weight", "exp_avg")
    }


def _ranks_of_elements(states: list[State], key: str) -> RankOfElement:
    """Return which rank has each element of an array: the lowest, where several have equal ones."""
    import torch

    ranks = torch.empty(ROWS, COLUMNS, dtype=torch.long)
    for rank, state in reversed(list(enumerate(states))):
        shard = state[key]
        local = ranks[shard.global_slice()].flatten()
        local[shard.flattened_range or slice(None)] = rank
        ranks[shard.global_slice()] = local.view(shard.local_shape)
    rows: RankOfElement = ranks.tolist()
    return rows


def _are_equal(state: State, arrays: dict[str, torch.Tensor]) -> bool:
    import torch

    pairs = ((shard.data, arrays[key][shard.global_slice()]) for key, shard in state.items())
    return all(data is not None and torch.equal(data, array) for data, array in pairs)


def _show(result: dict[str, Any], directory: str | None) -> None:
    verdict = "equals what was saved" if result["equal"] else "DIFFERS from what was saved"
    show(
        Text("1. Four ranks save at TP2 x DP2. A number is the rank that has the element."),
        _picture(result["saved"], weight="rows, with copies on DP", exp_avg="rows, cut on over DP"),
        Text("2. The checkpoint:"),
        *(Text(f"   {name}, {size:,} bytes") for name, size in result["files"].items()),
        Text("\n3. Three ranks load at TP3, cut along the other axis."),
        _picture(result["loaded"], weight="columns", exp_avg="columns"),
        Text(f"4. What was loaded {verdict}, bit for bit."),
        Text(_next_step(directory)),
    )


def _picture(ranks: dict[str, RankOfElement], **cuts: str) -> Table:
    panels = [Panel(_grid(rows), title=key, subtitle=cuts[key], expand=False) for key, rows in ranks.items()]
    table = Table.grid()
    table.add_row(*panels)
    return table


def _grid(rows: RankOfElement) -> Text:
    cells = [[Text(f" {rank} ", style=_COLOURS[rank]) for rank in row] for row in rows]
    return Text("\n").join(Text().join(row) for row in cells)


def _next_step(directory: str | None) -> str:
    if directory is None:
        return "\nTo keep the checkpoint, and look at it: megackpt demo --dir demo"
    return f"\nNext: megackpt inspect {directory}, megackpt verify {directory}"
