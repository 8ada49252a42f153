"""`megackpt maps`: families of names, and the map of one for a config."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megackpt.cli.entry import EXIT_CODES, json_option, print_result
from megackpt.cli.locations import LocalPath
from megackpt.cli.tables import limited_table, show, table_of
from megackpt.errors import MapError

if TYPE_CHECKING:
    from megackpt.maps.table import MapRow

_LEFT = ("ours", "axes", "theirs", "axes", "shape", "their shape", "layers")


@click.command(name="maps", cls=click.Group, invoke_without_command=True, epilog=EXIT_CODES)
@json_option
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> None:
    """List the families of names that checkpoints can be mapped to and from.

    A family is chosen by its name, or by the `model_type` of a config.json.
    """
    if context.invoked_subcommand is not None:
        return
    from megackpt.maps import known_families

    known = {name: family.model_types for name, family in sorted(known_families().items())}
    if as_json:
        print_result({"families": {name: list(types) for name, types in known.items()}}, "", as_json=True)
        return
    rows = [(name, ", ".join(types)) for name, types in known.items()]
    show(table_of(f"{len(rows)} families", rows, left=("name", "model types")))


@command.command(name="show", epilog=EXIT_CODES)
@click.argument("name", metavar="[FAMILY]", default="auto")
@click.option(
    "--config",
    "source",
    required=True,
    type=LocalPath(exists=True),
    help="config.json, or the Hugging Face folder that has it.",
)
@click.option(
    "--layers", type=click.IntRange(1), metavar="N", help="Keys of the first N layers, instead of {layer}."
)
@click.option(
    "--limit", default=0, show_default=True, type=click.IntRange(0), help="Rows of the table; 0 for all."
)
@json_option
def show_map(name: str, *, source: str, layers: int | None, limit: int, as_json: bool) -> None:
    """Show which of our arrays is where in a family, and prove that no element is lost or moved twice.

    FAMILY is a name of `megackpt maps`; without it, it is that of the config's `model_type`. The arrays are
    those of a folder that is written, or of the folder that --config names if it has weights.
    """
    from megackpt.maps import family, family_of
    from megackpt.maps.table import map_rows

    config, keys = _read(Path(source))
    chosen = family_of(config) if name == "auto" else family(name)
    made = chosen.region_map(config, keys)
    rules = chosen.rules(config, keys)
    rows = map_rows(rules, made)
    if layers is not None:
        rows = [one for row in rows for one in row.of_layers(layers)]
    proof = (
        f"proved: every element of {len(made.left)} arrays of ours and {len(made.right)} of {chosen.name} is "
        f"in exactly one of {len(made.pairs)} pairs"
    )
    if as_json:
        counts = {"ours": len(made.left), "theirs": len(made.right), "pairs": len(made.pairs)}
        result = {"family": chosen.name, "sizes": dict(rules.sizes), "rows": [*map(asdict, rows)]}
        print_result({**result, "proved": counts}, "", as_json=True)
        return
    show(
        limited_table(f"{chosen.name}: {_sizes(rules.sizes)}", _LEFT, (), [*map(_cells, rows)], limit), proof
    )


def _read(path: Path) -> tuple[dict[str, Any], Collection[str]]:
    """Return a config and the keys of the folder that it is in; no keys if there are no weights."""
    if not path.is_dir():
        return _config(path), ()
    keys: Collection[str] = ()
    if any(path.glob("*.safetensors")):
        from megackpt.api import load_sharded_metadata

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

    row = replace(row, axes=row.axes or "-", their_axes=row.their_axes or "-")
    shapes = (str(list(row.shape)), str(list(row.their_shape)))
    return (row.ours, row.axes, row.theirs, row.their_axes, *shapes, spelled_layers(row.layers))


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
