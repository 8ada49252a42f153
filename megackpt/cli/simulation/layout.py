"""Layouts of simulated jobs as text, and numpy columns of their ranks.

A layout is written as `tp8,pp16,dp128`.
"""

from __future__ import annotations

import re

import numpy as np

from megackpt.errors import DeclarationError
from megackpt.plans.geometry import Ints
from megackpt.training.parallel import ParallelLayout, StageTable

_ITEM = re.compile(r"(tp|cp|etp|ep|pp|vpp|dp|world)\s*=?\s*(\d+)", re.IGNORECASE)

MAX_WORLD = 1 << 17
"""More ranks than this are taken for a typing error."""


def parse_layout(text: str) -> ParallelLayout:
    """Return the layout that text names: sizes of axes, separated by commas.

    `world` stands for dp times the others.

    >>> parse_layout("tp8,pp16,ep32,world16384")
    ParallelLayout(tp=8, pp=16, dp=128, cp=1, ep=32, etp=8, vpp=1)

    Raises:
        DeclarationError: text is no layout, names an axis twice, its sizes contradict each other, or there
            are too many ranks.
    """
    sizes = _sizes_of(text)
    world = sizes.pop("world", None)
    replica = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1)
    if world is not None and "dp" not in sizes and replica:
        sizes["dp"] = max(1, world // replica)
    layout = ParallelLayout(**sizes)
    _check_world(layout, world, text)
    return layout


def _check_world(layout: ParallelLayout, world: int | None, text: str) -> None:
    if world is not None and layout.world_size != world:
        raise DeclarationError(
            f"{text!r}: {world} ranks cannot be divided so; tp={layout.tp} x cp={layout.cp} x "
            f"pp={layout.pp} x dp={layout.dp} are {layout.world_size}. Give a world that is "
            f"a multiple of tp x cp x pp, or leave it out."
        )
    if layout.world_size > MAX_WORLD:
        raise DeclarationError(
            f"{text!r} has {layout.world_size} ranks; at most {MAX_WORLD} are planned. Give fewer."
        )


def _sizes_of(text: str) -> dict[str, int]:
    """Return the number after each name, by name."""
    sizes: dict[str, int] = {}
    for item in map(str.strip, text.split(",")):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise _layout_error(text, f"{item!r} is not an axis with its size")
        if match[1].lower() in sizes:
            raise _layout_error(text, "it names an axis twice")
        sizes[match[1].lower()] = int(match[2])
    return sizes


def _layout_error(text: str, fault: str) -> DeclarationError:
    return DeclarationError(
        f"{text!r} is no layout: {fault}. Write one as tp8,pp16,dp128, with cp, ep, etp, vpp or world where "
        f"wanted."
    )


def layout_title(layout: ParallelLayout) -> str:
    """Return a layout in a few letters; axes of size 1 are left out, but for tp, pp and dp.

    >>> layout_title(ParallelLayout(tp=2, dp=4, ep=4, etp=1))
    'TP2 PP1 DP4 EP4 ETP1'
    """
    others = [
        ("CP", layout.cp, 1),
        ("VPP", layout.vpp, 1),
        ("EP", layout.ep, 1),
        ("ETP", layout.etp, layout.tp),
    ]
    texts = [f"TP{layout.tp}", f"PP{layout.pp}", f"DP{layout.dp}"]
    return " ".join(texts + [f"{name}{size}" for name, size, default in others if size != default])


def replica_ranks(layout: ParallelLayout, *, tp: int, pp: int) -> Ints:
    """Return the ranks that have the dense weights of one (tp, pp), ascending, `[dp * cp]`."""
    number = layout.dp * layout.cp
    return tp + layout.tp * (np.arange(number, dtype=np.int64) + number * pp)


def expert_replica_ranks(layout: ParallelLayout, *, etp: int, ep: int, pp: int) -> Ints:
    """Return the ranks that have the experts of one (etp, ep, pp), ascending, `[edp]`."""
    number = np.arange(layout.edp, dtype=np.int64) + layout.edp * pp
    return etp + layout.etp * (ep + layout.ep * number)


def layers_of_stages(num_layers: int, layout: ParallelLayout, *, ends_count: bool) -> list[tuple[int, ...]]:
    """Return the layers of each pipeline stage, those of all of its model chunks in order.

    With ends_count embedding and output layer count as one layer each.

    >>> stages = layers_of_stages(126, ParallelLayout(pp=16), ends_count=True)
    >>> [len(layers) for layers in stages]
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]
    >>> layers_of_stages(8, ParallelLayout(pp=2, vpp=2), ends_count=False)
    [(0, 1, 4, 5), (2, 3, 6, 7)]

    Raises:
        DeclarationError: fewer layers than virtual stages.
    """
    ends = ends_count and layout.pp > 1
    table = StageTable.even(
        num_layers, pp=layout.pp, vpp=layout.vpp, account_for_embedding=ends, account_for_loss=ends
    )
    return [
        tuple(layer for chunk in range(layout.vpp) for layer in table.layers_of(stage, chunk))
        for stage in range(layout.pp)
    ]
