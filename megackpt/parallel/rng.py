"""Random streams of one rank, and dropout that draws from them.

The generators are explicit and torch's global generator is not used. So a resumed run draws exactly what an
uninterrupted one would, whatever else in the process uses random numbers. Initial weights are not drawn from
these streams, as they must not depend on the layout (see `models.init`).
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megackpt.errors import DeclarationError, MismatchError
from megackpt.mapping import ShardedObject, ShardedStateDict
from megackpt.parallel.groups import ParallelGroups

Stream = Literal["replicated", "distinct"]

# The coordinates that the seed of a stream depends on. "replicated" is for activations that are equal on all
# of tp: all of tp must drop the same elements.
_COORDINATES: dict[Stream, tuple[str, ...]] = {"replicated": ("pp", "dp"), "distinct": ("pp", "dp", "tp")}


class ParallelRng:
    """The two random streams of a rank: `replicated` (equal over tp) and `distinct` (its own).

    A stream's state follows from the base seed, the step of the last `reseed` and the rank's coordinates,
    and then from what was drawn. Resuming at the same layout restores the states: bit for bit the same run.
    At another layout there is no state to restore (256 streams cannot become 128); call `reseed(step)`, whose
    streams depend on seed, step and the new coordinates only, not on the layout before.

    Args:
        seed: base seed of the job, equal on all ranks.
        groups: the ranks around this one.
        device: where the random numbers are wanted.
    """

    def __init__(self, seed: int, groups: ParallelGroups, *, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.groups = groups
        self._generators: dict[Stream, torch.Generator] = {
            stream: torch.Generator(device=device) for stream in _COORDINATES
        }
        self.reseed(0)

    @property
    def replicated(self) -> torch.Generator:
        """The stream that is equal on all ranks of a tp axis."""
        return self._generators["replicated"]

    @property
    def distinct(self) -> torch.Generator:
        """The stream of this rank only."""
        return self._generators["distinct"]

    def generator(self, stream: Stream) -> torch.Generator:
        """Return the generator of `stream`."""
        return self._generators[stream]

    def reseed(self, step: int) -> None:
        """Restart both streams from the base seed, `step` and this rank's coordinates. Local.

        Call it on every rank after loading a checkpoint of step `step` at another layout than it was saved
        at.
        """
        coordinates = self.groups.layout.coordinates(self.groups.rank)
        for stream, names in _COORDINATES.items():
            indices = tuple(getattr(coordinates, name) for name in names)
            self._generators[stream].manual_seed(stable_seed(self.seed, step, stream, *indices))

    def state_dict(self) -> dict[str, Any]:
        """Return seed, layout `(pp, tp, dp)` and both states (uint8 tensors on the CPU). Local."""
        states: dict[str, Any] = {
            stream: generator.get_state() for stream, generator in self._generators.items()
        }
        return {"seed": self.seed, "layout": self._layout()} | states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, saved by the rank with the same coordinates of the same layout. Local.

        Raises:
            MismatchError: the state belongs to another layout.
        """
        if tuple(state["layout"]) != self._layout():
            raise MismatchError(
                f"'rng_state' was saved at (pp, tp, dp) = {tuple(state['layout'])} but this run has "
                f"{self._layout()}: its streams have no counterpart here. Call reseed(step) on every rank "
                f"instead of loading them.",
                key="rng_state",
                rank=self.groups.rank,
            )
        self.seed = int(state["seed"])
        for stream, generator in self._generators.items():
            generator.set_state(state[stream].cpu())

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "rng_state"`, one element per rank of an array `(pp, tp, dp)`. Local."""
        coordinates = self.groups.layout.coordinates(self.groups.rank)
        key = f"{prefix}rng_state"
        return {
            key: ShardedObject(
                key=key,
                data=self.state_dict(),
                global_shape=self._layout(),
                global_offset=(coordinates.pp, coordinates.tp, coordinates.dp),
            )
        }

    def _layout(self) -> tuple[int, int, int]:
        layout = self.groups.layout
        return (layout.pp, layout.tp, layout.dp)


class ParallelDropout(nn.Module):
    """Dropout that draws from one stream of a `ParallelRng`; the identity in evaluation and at `p == 0`.

    Args:
        p: probability that an element becomes 0; in `[0, 1)`.
        rng: the streams; may be None where p is 0.
        stream: `replicated` for activations that are equal on all of tp, `distinct` for those that differ by
            rank.

    Raises:
        DeclarationError: p is out of range, or needs an rng and has none.
    """

    def __init__(self, p: float, rng: ParallelRng | None, stream: Stream) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise DeclarationError(f"dropout probability {p} is not in [0, 1). Use 0 for no dropout.")
        if p and rng is None:
            raise DeclarationError(
                f"dropout of {p} has no random stream to draw from. Give rng=ParallelRng(seed, groups), or "
                f"p=0."
            )
        self.p = p
        self.rng = rng
        self.stream: Stream = stream

    @property
    def is_active(self) -> bool:
        """Whether a call would drop anything."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements dropped and the others scaled by `1 / (1 - p)`. Local."""
        if not self.is_active:
            return x
        assert self.rng is not None
        return dropout(x, self.p, self.rng.generator(self.stream))


def dropout(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Drop elements of x with probability p, drawing from `generator` (on x's device). Local; advances it.

    One float32 is drawn for each element, so that the mask does not depend on x's dtype.
    """
    kept = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return x * (kept / (1 - p)).to(x.dtype)


def stable_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is the same in every process, release and platform for equal `parts`.

    >>> stable_seed(1, "a") == stable_seed(1, "a") != stable_seed("1", "a")
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
