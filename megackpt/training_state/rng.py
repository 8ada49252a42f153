"""RngState: the random streams of all ranks, as an array of objects by coordinates.

Owns whose state is given back to whom: at the layout it was saved at, each rank's own, bit for bit; at any
other, nobody's. What a generator's state is stands in `rng_sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from megackpt.errors import DeclarationError, MismatchError
from megackpt.mapping import ShardedObject, ShardedStateDict
from megackpt.parallel import ParallelRng
from megackpt.training_state.rank_position import RankPosition, in_words
from megackpt.training_state.rng_sources import RngSource, Seeds, StatesTracker, sources_of_process


class RngState:
    """What this rank draws random numbers from.

    The streams of 256 ranks cannot become those of 128. So at another layout there is no state to give back:
    `elsewhere="error"` refuses, `"reseed"` begins new streams that are a function of seed, step and the new
    coordinates, whatever layout came before. No rank ever gets the state of another.

    Args:
        position: where this rank stands.
        seed: base seed of the job, equal on all ranks.
        sources: the generators by name; names are equal on all ranks.
        elsewhere: what to do at another layout, or with other sources.
    """

    def __init__(
        self,
        position: RankPosition,
        *,
        seed: int,
        sources: Mapping[str, RngSource],
        elsewhere: Literal["error", "reseed"] = "error",
    ) -> None:
        if elsewhere not in ("error", "reseed"):
            raise DeclarationError(f"elsewhere={elsewhere!r} is not known. Give 'error' or 'reseed'.")
        self.position = position
        self.seed = seed
        self.sources = dict(sources)
        self.elsewhere = elsewhere

    @classmethod
    def of_process(
        cls,
        position: RankPosition,
        *,
        seed: int,
        parallel: ParallelRng | None = None,
        tracker: StatesTracker | None = None,
        generators: Mapping[str, np.random.Generator] | None = None,
        elsewhere: Literal["error", "reseed"] = "error",
    ) -> RngState:
        """Return that of everything in this process: python, numpy, torch on the CPU and all CUDA devices.

        Args:
            position: as for the class.
            seed: as for the class.
            parallel: our streams, if the model has any.
            tracker: Megatron's, as `get_cuda_rng_tracker()` returns it, if it is used.
            generators: numpy's generators of the program's own, by name.
            elsewhere: as for the class.
        """
        sources = sources_of_process(parallel=parallel, tracker=tracker, generators=generators or {})
        return cls(position, seed=seed, sources=sources, elsewhere=elsewhere)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "rng"`, an object for each rank, and the layout as common state. Local."""
        return {
            "layout": dict(self.position.layout),
            "sources": sorted(self.sources),
            "states": ShardedObject(
                f"{prefix}rng",
                {name: source.capture() for name, source in self.sources.items()},
                self.position.shape,
                self.position.offset,
                elsewhere="keep",
            ),
        }

    def resume(self, loaded: Any, *, step: int) -> str:
        """Give this rank its own state back, or do what `elsewhere` says. Local.

        Returns a note if streams are fresh.

        Raises:
            MismatchError: the layout or the sources differ, and `elsewhere` is "error".
        """
        different = self._difference(loaded)
        if not different:
            for name, source in self.sources.items():
                source.restore(loaded["states"][name])
            return ""
        if self.elsewhere == "error":
            raise MismatchError(
                f"The random states were saved {different}: no rank's state is this one's. Resume as it was "
                f'saved, or make fresh streams with RngState(..., elsewhere="reseed").',
                key="rng",
            )
        seeds = Seeds(base=self.seed, step=step, position=self.position)
        for source in self.sources.values():
            source.reseed(seeds)
        return f"random streams are fresh: they were saved {different}"

    def _difference(self, loaded: Any) -> str:
        """Say what differs between what was saved and what is here, "" if nothing does."""
        layout = dict(self.position.layout)
        if loaded["layout"] != layout:
            return f"at {in_words(loaded['layout'])}, and this run is at {in_words(layout)}"
        if loaded["sources"] != sorted(self.sources):
            return f"from {', '.join(loaded['sources'])}, and this run has {', '.join(sorted(self.sources))}"
        return ""
