"""Random streams of one rank, and dropout that draws from them.

The generators are explicit and torch's global generator is not used. So a resumed run draws exactly what an
uninterrupted one would, whatever else in the process uses random numbers. Initial weights are not drawn from
these streams, as they must not depend on the layout (see `models.init`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megackpt.entities import ShardedObject, ShardedStateDict
from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.parallel.groups import ParallelGroups

Stream = Literal["replicated", "distinct", "expert"]

# The indices that the seed of a stream depends on; those of `_indices`.
_SEED_INDICES: dict[Stream, tuple[str, ...]] = {
    "replicated": ("pp", "dp_cp"),
    "distinct": ("pp", "dp_cp", "tp"),
    "expert": ("pp", "ep", "etp"),
}


class ParallelRng:
    """The random streams of a rank: `replicated`, `distinct` and `expert`.

    * `replicated` is equal over tp. For activations that all ranks of tp have: they must drop the same
      elements.
    * `distinct` is different on each rank. For activations of which each rank has its own: heads, features,
      a part of the sequence.
    * `expert` is equal over edp. For what the replicas of an expert must have in common: its initial weights,
      noise on its weights.

    They are the streams of Megatron's tracker (data-parallel, model-parallel, expert-parallel), with one
    difference: ranks of dp and of cp have different tokens, so `replicated` and `distinct` differ over both.
    Megatron draws the same numbers there, unless `--data-parallel-random-init` seeds the ranks of dp
    differently. Dropout inside of an expert draws from `distinct`, not from `expert`: replicas of an expert
    have different tokens.

    A stream's state follows from the base seed, the step of the last `reseed` and the rank's coordinates,
    and then from what was drawn. Resuming at the same layout restores the states: bit for bit the same run.
    At another layout there is no state to restore (256 streams cannot become 128); call `reseed(step)`, whose
    streams depend on seed, step and the new coordinates only, not on the layout before.

    Args:
        seed: base seed of the job, equal on all ranks.
        groups: the ranks around this one.
        device: where the random numbers are wanted.

    Source: Megatron-Core `tensor_parallel.random.model_parallel_cuda_manual_seed`.
    """

    def __init__(self, seed: int, groups: ParallelGroups, *, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.groups = groups
        self._generators: dict[Stream, torch.Generator] = {
            stream: torch.Generator(device=device) for stream in _SEED_INDICES
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

    @property
    def expert(self) -> torch.Generator:
        """The stream that is equal on all ranks with the same slices of the same experts."""
        return self._generators["expert"]

    def generator(self, stream: Stream) -> torch.Generator:
        """Return the generator of `stream`. Local."""
        return self._generators[stream]

    def reseed(self, step: int) -> None:
        """Restart all streams from the base seed, `step` and this rank's coordinates. Local.

        Call it on every rank after loading a checkpoint of step `step` at another layout than it was saved
        at.
        """
        for stream in _SEED_INDICES:
            self._reseed(stream, step)

    def state_dict(self) -> dict[str, Any]:
        """Return seed, layout (sizes by axis) and all states (uint8 tensors on the CPU). Local."""
        states: dict[str, Any] = {
            stream: generator.get_state() for stream, generator in self._generators.items()
        }
        return {"seed": self.seed, "layout": self._layout()} | states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, saved by the rank with the same coordinates of the same layout. Local.

        A state that was saved before there was a stream for experts begins that stream anew, at step 0.

        Raises:
            MismatchError: the state belongs to another layout.
        """
        saved_at = _as_sizes(state["layout"])
        if saved_at != self._layout():
            raise MismatchError(
                f"'rng_state' was saved at {_text(saved_at)}, but this run is at {_text(self._layout())}: "
                f"its streams have no counterpart here. Call reseed(step) on every rank instead of loading "
                f"them.",
                key="rng_state",
                rank=self.groups.rank,
            )
        self.seed = int(state["seed"])
        for stream, generator in self._generators.items():
            if stream in state:
                generator.set_state(state[stream].cpu())
            else:
                self._reseed(stream, 0)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Declare `prefix + "rng_state"`, one element per rank of an array `(pp, tp, dp * cp)`. Local."""
        layout, index = self.groups.layout, self._indices()
        key = f"{prefix}rng_state"
        return {
            key: ShardedObject(
                key=key,
                data=self.state_dict(),
                global_shape=(layout.pp, layout.tp, layout.size("dp_cp")),
                global_offset=(index["pp"], index["tp"], index["dp_cp"]),
            )
        }

    def _reseed(self, stream: Stream, step: int) -> None:
        index = self._indices()
        indices = tuple(index[name] for name in _SEED_INDICES[stream])
        self._generators[stream].manual_seed(stable_seed(self.seed, step, stream, *indices))

    def _indices(self) -> dict[str, int]:
        """Return this rank's index along each axis, and among the ranks with the same weights (dp_cp)."""
        layout, rank = self.groups.layout, self.groups.rank
        dense, expert = layout.coordinates(rank), layout.expert_coordinates(rank)
        dp_cp = dense.dp * layout.cp + dense.cp
        return {"pp": dense.pp, "tp": dense.tp, "dp_cp": dp_cp, "ep": expert.ep, "etp": expert.etp}

    def _layout(self) -> dict[str, int]:
        layout = self.groups.layout
        return {axis: layout.size(axis) for axis in ("pp", "tp", "dp", "cp", "ep", "etp")}


def _as_sizes(layout: Mapping[str, int] | Sequence[int]) -> dict[str, int]:
    """Return the sizes of a stored layout by axis. Before there were cp and ep it was `(pp, tp, dp)`."""
    if isinstance(layout, Mapping):
        return dict(layout)
    pp, tp, dp = layout
    return {"pp": pp, "tp": tp, "dp": dp, "cp": 1, "ep": 1, "etp": tp}


def _text(layout: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in layout.items())


class ParallelDropout(nn.Module):
    """Dropout that draws from one stream of a `ParallelRng`; the identity in evaluation and at `p == 0`.

    Args:
        p: probability that an element becomes 0; in `[0, 1)`.
        rng: the streams; may be None where p is 0.
        stream: `replicated` for activations that are equal on all of tp, `distinct` for those that differ by
            rank; see `ParallelRng`.

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
    """Return a 63-bit seed that is the same in every process, release and platform for equal `parts`. Pure.

    >>> stable_seed(1, "a") == stable_seed(1, "a") != stable_seed("1", "a")
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
