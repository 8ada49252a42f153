"""What planning a job has shown: bytes, files and times, by rank where they differ.

`report` and `chart` make tables and pictures of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megackpt.plans.geometry import Ints
from megackpt.training.parallel import ParallelLayout

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SaveOutcome:
    """The save of a job; bytes are those of chunks, without the headers of files.

    Attributes:
        layout: of the job; None for a checkpoint that is there, whose layout is not known.
        nbytes: what each rank writes, `[world]`, or what each data file holds.
        chunks: chunks that each writes, `[world]`.
        arrays: number of global arrays.
        index_nbytes: size of the index.
        rank_s: time in which each rank packs what it declares and unpacks what it is to write, `[world]`;
            empty for a checkpoint.
        describe_s: time in which each rank describes its state, in every save, `[world]`; empty likewise.
        merge_s: time in which rank 0 merges what ranks declare.
        prove_s: its time for the proof that everything is covered once.
        plan_s: its time for the plan of all ranks.
        pack_s: its time for the rows of each rank.
        index_s: its time for the index.
        gathered_nbytes: what it receives before it plans.
        plan_nbytes: memory that the plan takes there; other ranks have their own rows.
    """

    layout: ParallelLayout | None
    nbytes: Ints
    chunks: Ints
    arrays: int
    index_nbytes: int
    rank_s: Seconds
    describe_s: Seconds
    merge_s: float = 0.0
    prove_s: float = 0.0
    plan_s: float = 0.0
    pack_s: float = 0.0
    index_s: float = 0.0
    gathered_nbytes: int = 0
    plan_nbytes: int = 0

    @property
    def total_nbytes(self) -> int:
        """Bytes of all chunks, each once."""
        return int(self.nbytes.sum())

    @property
    def files(self) -> int:
        """Data files: one for each rank that writes anything."""
        return int((self.nbytes > 0).sum())

    @property
    def balance(self) -> float:
        """The most that a rank writes over the mean; 1 is even."""
        return balance_of(self.nbytes)

    @property
    def stage_balance(self) -> float | None:
        """The worst balance among the ranks of one pipeline stage; None for a checkpoint.

        Optimizer state stays on the stage of its layer, so this is what planning decides. Stages differ by
        their layers.
        """
        if self.layout is None:
            return None
        return max(balance_of(of_stage) for of_stage in self.nbytes.reshape(self.layout.pp, -1))

    @property
    def coordinator_s(self) -> float:
        """Time that rank 0 needs in all, without its own part."""
        return self.merge_s + self.prove_s + self.plan_s + self.pack_s + self.index_s

    @property
    def first_save_s(self) -> float:
        """Time for planning that only the first save of a structure needs: later ones use its plan."""
        return self.coordinator_s - self.index_s + float(self.rank_s.max(initial=0.0))

    @property
    def every_save_s(self) -> float:
        """Time that each save needs in addition to writing: the slowest rank's description, and the index."""
        return float(self.describe_s.max(initial=0.0)) + self.index_s

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "layout": None if self.layout is None else layout_json(self.layout),
            "arrays": self.arrays,
            "chunks": int(self.chunks.sum()),
            "files": self.files,
            "total_bytes": self.total_nbytes,
            "bytes_by_rank": spread_json(self.nbytes),
            "balance": self.balance,
            "stage_balance": self.stage_balance,
            "index_bytes": self.index_nbytes,
            "plan_bytes": self.plan_nbytes,
            "planning": {
                "rank_s": spread_json(self.rank_s),
                "describe_s": spread_json(self.describe_s),
                "merge_s": self.merge_s,
                "prove_s": self.prove_s,
                "plan_s": self.plan_s,
                "pack_s": self.pack_s,
                "index_s": self.index_s,
                "coordinator_s": self.coordinator_s,
                "gathered_bytes": self.gathered_nbytes,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadOutcome:
    """The load of a job, at a layout of its own.

    Attributes:
        layout: of the job.
        planned: ranks that were planned, ascending; numbers by rank are in their order.
        needed: bytes that each asks for and the checkpoint has, `[planned]`.
        read: bytes that each reads by itself, whole blocks, `[planned]`.
        files: data files that each reads from, `[planned]`.
        plan_s: time in which each is planned, `[planned]`.
        region_s: time for finding the rows of the index that a rank needs, `[groups]`.
        region_nbytes: memory that these rows take, at most.
        unique: bytes that the ranks of a data-parallel group ask for, each once, `[groups]`.
        shared_read: bytes that are read where the group reads each block once, `[groups]`.
    """

    layout: ParallelLayout
    planned: Ints
    needed: Ints
    read: Ints
    files: Ints
    plan_s: Seconds
    region_s: Seconds
    region_nbytes: int
    unique: Ints
    shared_read: Ints

    @property
    def total_needed(self) -> int:
        """Bytes that all ranks ask for; those that were not planned are taken for average ones."""
        return self._of_all(self.needed)

    @property
    def total_read(self) -> int:
        """Bytes that ranks read if each reads for itself."""
        return self._of_all(self.read)

    @property
    def over_read(self) -> float:
        """Bytes read over bytes asked for, if each rank reads for itself."""
        return int(self.read.sum()) / max(1, int(self.needed.sum()))

    @property
    def shared_over_read(self) -> float:
        """Bytes read over bytes asked for, each once, if groups exchange what they read."""
        return int(self.shared_read.sum()) / max(1, int(self.unique.sum()))

    @property
    def exchanged(self) -> int:
        """Bytes that are sent from rank to rank if groups exchange what they read, at least.

        This is the number if whoever reads a part also needs it. A part of a real exchange may contain
        shards of an optimizer that only other ranks need.
        """
        return max(0, self.total_needed - int(self.unique.sum()))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return {
            "layout": layout_json(self.layout),
            "ranks_planned": len(self.planned),
            "needed_bytes": self.total_needed,
            "needed_bytes_by_rank": spread_json(self.needed),
            "files_by_rank": spread_json(self.files),
            "direct": {
                "read_bytes": self.total_read,
                "read_bytes_by_rank": spread_json(self.read),
                "over_read": self.over_read,
                "balance": balance_of(self.read),
            },
            "exchange": {
                "read_bytes": int(self.shared_read.sum()),
                "read_bytes_by_group": spread_json(self.shared_read),
                "over_read": self.shared_over_read,
                "sent_bytes_at_least": self.exchanged,
                "ranks_in_group": self.layout.size("dp_cp"),
            },
            "planning": {
                "find_rows_s": spread_json(self.region_s),
                "plan_s_by_rank": spread_json(self.plan_s),
            },
            "index_rows_bytes": self.region_nbytes,
        }

    def _of_all(self, of_planned: Ints) -> int:
        total = int(of_planned.sum())
        if len(self.planned) == self.layout.world_size:
            return total
        return round(total * self.layout.world_size / max(1, len(self.planned)))


def balance_of(numbers: Ints) -> float:
    """Return the largest over the mean; 1 where there is nothing."""
    mean = float(numbers.mean()) if len(numbers) else 0.0
    return float(numbers.max()) / mean if mean else 1.0


def layout_json(layout: ParallelLayout) -> dict[str, int]:
    """Return a layout as plain JSON."""
    axes = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp")
    return {axis: getattr(layout, axis) for axis in axes} | {"world": layout.world_size}


def spread_json(numbers: Ints | Seconds) -> dict[str, float | int] | None:
    """Return the least, the median, the mean and the most; None where there are none."""
    if not len(numbers):
        return None
    is_whole = numbers.dtype.kind == "i"
    median = float(np.median(numbers))
    return {
        "min": int(numbers.min()) if is_whole else float(numbers.min()),
        "median": math.floor(median) if is_whole else median,
        "mean": float(numbers.mean()),
        "max": int(numbers.max()) if is_whole else float(numbers.max()),
    }
