"""Layouts of simulated jobs: sizes along each axis, and the numbering of ranks.

A layout is written as `tp8,pp16,dp128`. Unlike
`megackpt.parallel.ParallelLayout`, which runs models, it knows expert parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.errors import DeclarationError
from megackpt.geometry import Ints
from megackpt.parallel import StageTable

_ITEM = re.compile(r"(tp|pp|ep|dp|world)\s*=?\s*(\d+)", re.IGNORECASE)

MAX_WORLD = 1 << 17
"""More ranks than this are taken for a slip of the pen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLayout:
    """How many ways a job is cut along each axis; `tp` is the fastest in rank order, then `dp`, then `pp`.

    Experts regroup the ranks of dp: neighbours in `ep` hold different experts, and `dp / ep` ranks hold the
    same ones. Each expert is cut over tp like any other weight.

    >>> JobLayout.parse("tp8,pp16,world16384")
    JobLayout(tp=8, pp=16, dp=128, ep=1)

    Raises:
        DeclarationError: a size below 1, ep that does not divide dp, or too many ranks.

    Source: Megatron-Core's default order of ranks, `tp-cp-ep-dp-pp` (`parallel_state.RankGenerator`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise DeclarationError(f"layout {self}: {name} must be at least 1.")
        if self.dp % self.ep:
            raise DeclarationError(
                f"layout {self}: ep={self.ep} does not divide dp={self.dp}, whose ranks share the experts. "
                f"Choose a divisor."
            )
        if self.world > MAX_WORLD:
            raise DeclarationError(f"layout {self} has {self.world} ranks; at most {MAX_WORLD} are planned.")

    @classmethod
    def parse(cls, text: str) -> JobLayout:
        """Return the layout that text names, sizes of axes by commas; `world` stands for dp times the others.

        Raises:
            DeclarationError: text is no layout, names an axis twice, or its sizes contradict each other.
        """
        items = [item.strip() for item in text.split(",")]
        matches = [_ITEM.fullmatch(item) for item in items]
        wrong = [item for item, match in zip(items, matches, strict=True) if match is None]
        names = [match[1].lower() for match in matches if match is not None]
        if wrong or len(set(names)) < len(names):
            raise DeclarationError(
                f"{text!r} is no layout: "
                + (f"{wrong[0]!r} is not an axis with its size." if wrong else "it names an axis twice.")
                + " Write one as tp8,pp16,dp128, with ep or world where wanted."
            )
        sizes = {name: int(match[2]) for name, match in zip(names, matches, strict=True) if match is not None}
        world = sizes.pop("world", None)
        model = sizes.get("tp", 1) * sizes.get("pp", 1)
        if world is not None and "dp" not in sizes and model:
            sizes["dp"] = max(1, world // model)
        layout = cls(**sizes)
        if world is not None and layout.world != world:
            raise DeclarationError(
                f"{text!r}: {world} ranks cannot be divided so; tp={layout.tp} x pp={layout.pp} x "
                f"dp={layout.dp} are {layout.world}. Give a world that is a multiple of tp x pp, or leave it "
                f"out."
            )
        return layout

    def __str__(self) -> str:
        return f"TP{self.tp} PP{self.pp} DP{self.dp}" + (f" EP{self.ep}" if self.ep > 1 else "")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def ranks_of(self, *, tp: int, pp: int) -> Ints:
        """Return the data-parallel ranks of one part of the model, in order, `[dp]`."""
        return tp + self.tp * (np.arange(self.dp, dtype=np.int64) + self.dp * pp)


def layers_of_stages(num_layers: int, stages: int, *, ends_count: bool) -> Sequence[Sequence[int]]:
    """Return the layers of each stage; with ends_count embedding and output layer count as one each.

    >>> [len(owned) for owned in layers_of_stages(126, 16, ends_count=True)]
    [7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7]

    Raises:
        DeclarationError: fewer layers than stages.
    """
    ends = ends_count and stages > 1
    table = StageTable.even(num_layers, pp=stages, account_for_embedding=ends, account_for_loss=ends)
    return table.layers
