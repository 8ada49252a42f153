"""Contenders: the interface of a way to save and load a state, and megackpt in each of its formats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from megackpt.cli.benchmark.report import OURS
from megackpt.cli.benchmark.state import GridLayout, RankState, Shard
from megackpt.engine.saving.plan_cache import PlanCache
from megackpt.entities import ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError
from megackpt.formats.registry import DEFAULT_BACKEND, save_strategies
from megackpt.run.collective import load, save


class Contender(Protocol):
    """One way to save and load a state. Saving and loading are collective, and durable when they return."""

    @property
    def name(self) -> str:
        """What it is called in results."""

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """Say why it cannot save at one layout and load at another; None if it can."""

    def declare(self, state: RankState) -> Any:
        """Return a rank's state as the library wants it; anew for each save and load, and not timed."""

    def save(self, declared: Any, directory: Path) -> None:
        """Save what was declared into a new, empty directory."""

    def load(self, declared: Any, directory: Path) -> None:
        """Fill the tensors that were declared."""


class Ours:
    """megackpt with one format, and default options. Plans are kept from one save to the next."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = OURS if backend == DEFAULT_BACKEND else f"{OURS}:{backend}"
        self._plans = PlanCache()

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """Any layout will do."""
        return None

    def declare(self, state: RankState) -> ShardedStateDict:
        """Declare each shard by the coordinates of its rank."""
        declared: ShardedStateDict = {p.key: _declared(p, state) for p in state.shards}
        return declared

    def save(self, declared: ShardedStateDict, directory: Path) -> None:
        """`megackpt.save`."""
        save(declared, directory, self.backend, plans=self._plans)

    def load(self, declared: ShardedStateDict, directory: Path) -> None:
        """`megackpt.load`."""
        load(declared, directory)


def native() -> Ours:
    """Return the one for the native format."""
    return Ours(DEFAULT_BACKEND)


def other_formats(chosen: Collection[str] | None) -> Iterator[Ours]:
    """Return one for every other format that can be saved with what is installed, or those of them chosen.

    Raises:
        DeclarationError: a chosen one is not there.
    """
    known = list(dict.fromkeys(strategy.backend for strategy in save_strategies()))
    unknown = [backend for backend in chosen or () if backend not in known]
    if unknown:
        raise DeclarationError(f"{unknown[0]!r} is no format here. Known are {', '.join(known)}.")
    for backend in known:
        if backend != DEFAULT_BACKEND and (chosen is None or backend in chosen):
            yield Ours(backend)


def _declared(shard: Shard, state: RankState) -> ShardedTensor:
    tp, tp_rank = state.layout.tp, state.layout.coordinates_of(state.rank)[0]
    offsets = [] if shard.tp_axis is None else [(shard.tp_axis, tp_rank, tp)]
    if shard.flat is None:
        return ShardedTensor.from_rank_offsets(shard.key, shard.data, *offsets, replica_id=shard.replica)
    return ShardedTensor.from_rank_offsets_flat(
        shard.key,
        shard.data,
        shard.box_shape,
        *offsets,
        flattened_range=shard.flat,
        replica_id=shard.replica,
    )
