"""The random streams of all ranks, stored as an array of objects by coordinates.

At the layout of the save each rank gets its own state back, bit for bit; at any other layout no state is
given back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.parallel import ParallelRng
from megackpt.training.state.rank_position import RankPosition, layout_text
from megackpt.training.state.rng_sources import RngSource, Seeds, StatesTracker, sources_of_process


class RngState:
    """The random number generators of this rank.

    The streams of 256 ranks cannot become those of 128. So at another layout there is no state to give back.
    `elsewhere="error"` raises an error; `"reseed"` begins new streams, which are a function of seed, step and
    the new coordinates, whatever the layout before was. No rank ever gets the state of another.

    Args:
        position: the position of this rank.
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
        """Return the state of all generators of this process: python, numpy, torch on CPU and CUDA devices.

        Local.

        Args:
            position: as for the class.
            seed: as for the class.
            parallel: the streams of `megackpt.training.parallel`, if the model has any.
            tracker: Megatron's tracker, as `get_cuda_rng_tracker()` returns it, if it is used.
            generators: the program's own numpy generators, by name.
            elsewhere: as for the class.
        """
        sources = sources_of_process(parallel=parallel, tracker=tracker, generators=generators or {})
        return cls(position, seed=seed, sources=sources, elsewhere=elsewhere)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "rng"`, an object for each rank, and the layout as common state. Local."""
        return {
            "layout": self.position.stored_layout,
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
        """Restore this rank's state, or do what `elsewhere` says. Local.

        Returns:
            A sentence if the streams are fresh, else "".

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
                f"The random states were saved {different}, so none of them belongs to this rank. Resume as "
                f'it was saved, or make fresh streams with RngState(..., elsewhere="reseed").',
                key="rng",
            )
        seeds = Seeds(base=self.seed, step=step, position=self.position)
        for source in self.sources.values():
            source.reseed(seeds)
        return f"random streams are fresh: they were saved {different}"

    def _difference(self, loaded: Any) -> str:
        """Return in words what differs between the save and this run; "" if nothing does."""
        layout = self.position.stored_layout
        if loaded["layout"] != layout:
            return f"at {layout_text(loaded['layout'])}, and this run is at {layout_text(layout)}"
        if loaded["sources"] != sorted(self.sources):
            return f"from {', '.join(loaded['sources'])}, and this run has {', '.join(sorted(self.sources))}"
        return ""
