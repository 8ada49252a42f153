"""`megackpt maps`: families of names, and the map of one for a config."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from megackpt.cli.entry import EPILOG, print_json, wants_json
from megackpt.cli.locations import LocalPath
from megackpt.cli.output import ProgressBars, show, table_of
from megackpt.errors import MapError

if TYPE_CHECKING:
    from megackpt.maps import FamilyRules, RegionMap
    from megackpt.maps.table import MapRow


@click.command(name="maps", cls=click.Group, invoke_without_command=True, epilog=EPILOG)
@click.pass_context
def command(context: click.Context) -> None:
    """List the families of names that checkpoints can be mapped to and from.

    A family is chosen by its name, or by the `model_type` of a config.json.
    """
    if context.invoked_subcommand is not None:
        return
    with ProgressBars("reading the families"):
        from megackpt.maps import known_families

        known = {name: family.model_types for name, family in sorted(known_families().items())}
    if wants_json():
        print_json({"families": {name: list(types) for name, types in known.items()}})
        return
    rows = [(name, ", ".join(types)) for name, types in known.items()]
    show(table_of(f"{len(rows)} families", rows, left=("name", "model types")))


@command.command(name="show", epilog=EPILOG)
@click.argument("name", metavar="[FAMILY]", default="auto")
@click.option(
    "--config",
    "source",
    required=True,
    type=LocalPath(exists=True),
    help="config.json, or the Hugging Face folder that has it.",
)
@click.option(
    "--megatron",
    is_flag=True,
    help="Show where our arrays of the model are in those of Megatron-Core, region by region.",
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    metavar="N",
    help="Keys of the first N layers, instead of {layer}; with --megatron 1.",
)
def show_map(name: str, *, source: str, megatron: bool, layers: int | None) -> None:
    """Show which of our arrays is where in a family, and prove that no element is lost or moved twice.

    FAMILY is a name of `megackpt maps`; without it, it is that of the config's `model_type`. The arrays are
    those of a folder that is written, or of the folder that --config names if it has weights.
    """
    with ProgressBars("proving the map"):
        from megackpt.maps import family, family_of, megatron_map

        config, keys = _read(Path(source))
        chosen = family_of(config) if name == "auto" else family(name)
        made, rules = chosen.region_map(config, keys), chosen.rules(config, keys)
        if megatron:
            made, theirs = megatron_map(made.left, rules.sizes), "Megatron-Core"
            table = _pair_table(made, layers or 1)
        else:
            table, theirs = _array_table(rules, made, layers), chosen.name
    if wants_json():
        counts = {"ours": len(made.left), "theirs": len(made.right), "pairs": len(made.pairs)}
        result = {"family": chosen.name, "sizes": dict(rules.sizes), "rows": table.rows, "proved": counts}
        print_json(result)
        return
    show(
        table_of(f"{chosen.name}: {_sizes(rules.sizes)}", table.cells, left=table.columns),
        f"proved: every element of {len(made.left)} arrays of ours and {len(made.right)} of {theirs} is in "
        f"exactly one of {len(made.pairs)} pairs",
    )


class _Table(NamedTuple):
    """Rows to be printed, as text and as JSON."""

    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]
    rows: list[dict[str, Any]]


def _array_table(rules: FamilyRules, made: RegionMap, layers: int | None) -> _Table:
    from megackpt.maps.table import map_rows

    rows = map_rows(rules, made)
    if layers is not None:
        rows = [of_layer for row in rows for of_layer in row.of_layers(layers)]
    columns = ("ours", "axes", "theirs", "axes", "shape", "their shape", "layers")
    return _Table(columns, [*map(_cells, rows)], [*map(asdict, rows)])


def _pair_table(made: RegionMap, layers: int) -> _Table:
    from megackpt.maps.table import pair_rows

    columns = ("ours", "region", "Megatron-Core", "their region")
    cells = list[tuple[str, ...]](pair_rows(made, layers=layers))
    names = ("ours", "region", "theirs", "their_region")
    return _Table(columns, cells, [dict(zip(names, row, strict=True)) for row in cells])


def _read(path: Path) -> tuple[dict[str, Any], Collection[str]]:
    """Return a config and the keys of the folder that it is in; no keys if there are no weights."""
    if not path.is_dir():
        return _config(path), ()
    keys: Collection[str] = ()
    if any(path.glob("*.safetensors")):
        from megackpt.run.local import load_sharded_metadata

        keys = load_sharded_metadata(path)
    return _config(path / "config.json"), keys


def _config(path: Path) -> dict[str, Any]:
    """Return a parsed config.json."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise MapError(
            f"{path} cannot be read: {error}. Give the config.json of a model, or the folder that has it.",
            path=str(path),
        ) from error
    if not isinstance(config, dict):
        raise MapError(f"{path} is no JSON object. Give the config.json of a model.", path=str(path))
    return config


def _cells(row: MapRow) -> tuple[str, ...]:
    from megackpt.maps.table import spelled_layers

    shapes = (str(list(row.shape)), str(list(row.their_shape)))
    return (row.ours, row.axes, row.theirs, row.their_axes, *shapes, spelled_layers(row.layers))


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
