"""Writing zarr checkpoints: what both versions have in common. Each has its own names of files."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from megackpt.formats.strategy import Capabilities, ChunkParts, Json, SaveStrategy
from megackpt.formats.zarr.array_documents import ZarrArray
from megackpt.formats.zarr.assembly import Assembler, WritePlan, gathered, put_file
from megackpt.formats.zarr.grids import Grid, GridRules, choose_grids
from megackpt.formats.zarr.library import tensorstore
from megackpt.formats.zarr.names import BACKEND
from megackpt.formats.zarr.rounds import find_touched_files, plan_rounds
from megackpt.geometry import Ints
from megackpt.metadata import ArraySpec
from megackpt.planning import SavePlan
from megackpt.storage import Store


class ZarrSaveStrategy(SaveStrategy):
    """Saves arrays as zarr, with sizes of files and chunks by rules. Used for one save at a time."""

    backend = BACKEND
    capabilities = Capabilities(writes_in_place=True)

    def __init__(self, rules: GridRules) -> None:
        self._rules = rules
        self._last: tuple[SavePlan, str, WritePlan] | None = None

    @abstractmethod
    def check_keys(self, arrays: tuple[ArraySpec, ...]) -> None:
        """Check that all keys can be stored.

        Raises:
            DeclarationError: some cannot.
        """

    @abstractmethod
    def array_of(self, spec: ArraySpec, grid: Grid, attempt: str) -> ZarrArray:
        """Return how an array is stored while it is not published."""

    @abstractmethod
    def object_name(self, spec: ArraySpec, offset: tuple[int, ...], attempt: str) -> str:
        """Return the file of an object while it is not published."""

    def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
        """Return the rows of a rank by round: ranks that share a file write it in different rounds.

        Raises:
            DeclarationError: a key cannot be stored; the same on every rank.
            MissingExtraError: tensorstore is not installed here.
        """
        tensorstore()
        self.check_keys(plan.table.arrays)
        rounds = self._planned(plan, "").rounds
        own_rows = plan.rows_of(rank)
        return [np.sort(own_rows[rounds.round[own_rows] == number]) for number in range(rounds.count)]

    def write_chunks(
        self, store: Store, *, attempt: str, rank: int, plan: SavePlan, rows: Ints, parts: ChunkParts
    ) -> bytes:
        """Write the files of one round. Rank 0 needs no receipt."""
        writing = self._planned(plan, attempt)
        table = plan.table
        # Whoever writes the first row of an array writes its documents, so that exactly one rank does.
        first_rows = np.searchsorted(table.array, np.arange(len(table.arrays)))
        assembler = Assembler(store, writing)
        tensors = [row for row in rows.tolist() if writing.arrays[int(table.array[row])] is not None]
        assembler.write(np.array(tensors, np.int64), parts)
        for row in rows.tolist():
            number = int(table.array[row])
            array, spec = writing.arrays[number], table.arrays[number]
            if array is None:
                offset = tuple(table.start[row, : len(spec.global_shape)].tolist())
                data = gathered(parts(row), int(table.nbytes[row])).tobytes()
                put_file(store, self.object_name(spec, offset, attempt), data)
            elif row == first_rows[number]:
                _put_documents(store, array)
        # Durable, with their names, before rank 0 publishes the files after the last round.
        store.sync()
        return b""

    def write_index(self, store: Store, *, attempt: str, plan: SavePlan, receipts: list[list[bytes]]) -> Json:
        """Write the documents of arrays without elements; `write_chunks` has written all others."""
        writing = self._planned(plan, attempt)
        filled = set(plan.table.array.tolist())
        for number, array in enumerate(writing.arrays):
            if array is not None and number not in filled:
                _put_documents(store, array)
        return {}

    def _planned(self, plan: SavePlan, attempt: str) -> WritePlan:
        """Return how a plan is written. It is kept, as each rank needs it several times in a save."""
        last = self._last  # read once: ranks simulated by threads may share a strategy
        if last is not None and last[0] is plan and last[1] == attempt:
            return last[2]
        grids = choose_grids(plan.table, self._rules)
        arrays = [
            None if grid is None else self.array_of(spec, grid, attempt)
            for spec, grid in zip(plan.table.arrays, grids, strict=True)
        ]
        # `rounds` asks before there is an attempt. Which rows touch which files does not depend on it, and is
        # what takes long to compute.
        if last is not None and last[0] is plan:
            touches, rounds = last[2].touches, last[2].rounds
        else:
            touches = find_touched_files(plan.table, grids)
            rounds = plan_rounds(plan, touches)
        planned = WritePlan(plan, arrays, touches, rounds)
        self._last = (plan, attempt, planned)
        return planned


def _put_documents(store: Store, array: ZarrArray) -> None:
    for name, data in array.documents().items():
        put_file(store, name, data)
