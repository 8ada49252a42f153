"""megackpt itself, in each of its formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import megackpt.api as api
from megackpt.bench.state import GridLayout, Piece, RankState
from megackpt.checkpointer import Checkpointer
from megackpt.formats.registry import DEFAULT_BACKEND, save_strategies
from megackpt.mapping import ShardedStateDict, ShardedTensor


class Ours:
    """megackpt with one format, and default options."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = "megackpt" if backend == DEFAULT_BACKEND else f"megackpt:{backend}"
        self._checkpointer: Checkpointer | None = None
        self._step = 0

    def refusal(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """Any layout will do."""
        return None

    def declare(self, state: RankState) -> ShardedStateDict:
        """Declare each piece by its place on the grid."""
        declared: ShardedStateDict = {p.key: _declared(p, state) for p in state.pieces}
        return declared

    def save(self, declared: ShardedStateDict, directory: Path) -> None:
        """`megackpt.save`."""
        api.save(declared, directory, self.backend)

    def load(self, declared: ShardedStateDict, directory: Path) -> None:
        """`megackpt.load`."""
        api.load(declared, directory)

    def save_behind(self, declared: ShardedStateDict, directory: Path) -> Callable[[], Path]:
        """`Checkpointer.save` with async_save; one Checkpointer for all of them, as in a training script."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                directory.parent / f"{self.backend}-steps", keep_last=1, async_save=True
            )
        self._step += 1
        self._checkpointer.save(self._step, declared, sharded_strategy=self.backend)
        return self._finish

    def _finish(self) -> Path:
        assert self._checkpointer is not None
        self._checkpointer.wait()
        return self._checkpointer.directory(self._step)


def ours() -> Iterator[Ours]:
    """Return one for every format that can be saved with what is installed, the native one first."""
    for backend in dict.fromkeys(strategy.backend for strategy in save_strategies()):
        yield Ours(backend)


def _declared(piece: Piece, state: RankState) -> ShardedTensor:
    tp, tp_rank = state.layout.tp, state.layout.place(state.rank)[0]
    offsets = [] if piece.tp_axis is None else [(piece.tp_axis, tp_rank, tp)]
    if piece.flat is None:
        return ShardedTensor.from_rank_offsets(piece.key, piece.data, *offsets, replica_id=piece.replica)
    return ShardedTensor.from_rank_offsets_flat(
        piece.key,
        piece.data,
        piece.block_shape,
        *offsets,
        flattened_range=piece.flat,
        replica_id=piece.replica,
    )
