"""Random number generators, each with methods to capture, restore and reseed its state.

States are plain values; nothing is pickled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from megackpt.errors import DeclarationError, MismatchError
from megackpt.training.parallel import ParallelRng
from megackpt.training.parallel.rng import stable_seed
from megackpt.training.state.rank_position import RankPosition

DATA_AXES = ("dp",)
"""Axes along which python's and numpy's generators are seeded differently.

Ranks that differ along other axes read the same samples and have to augment them in the same way.
"""

ACTIVATION_AXES = ("pp", "dp", "cp")
"""Axes along which torch's generators are seeded differently.

All ranks of tp have the same activations and have to drop the same ones. Ranks of dp and cp have different
tokens.
"""

TRACKED_AXES: Mapping[str, tuple[str, ...]] = {
    "data-parallel-rng": ("pp",),
    "model-parallel-rng": ("pp", "tp"),
    "expert-parallel-rng": ("pp", "ep", "etp"),
}
"""Axes along which the named states of Megatron's tracker are seeded differently.

Ranks of dp and cp draw the same numbers, as they do in Megatron unless its streams are seeded for each rank
of dp (`--data-parallel-random-init`). The state of experts is equal on the replicas of an expert.

Source: Megatron-Core `tensor_parallel.random.model_parallel_cuda_manual_seed`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """Fresh seeds, as a function of a base seed, a step and a rank's coordinates alone."""

    base: int
    step: int
    position: RankPosition

    def of(self, name: str, axes: tuple[str, ...]) -> int:
        """Return the 63-bit seed of the generator `name`, which differs along `axes` only. Pure."""
        coordinates = [value for pair in self.position.indices_along(axes) for value in pair]
        return stable_seed(self.base, self.step, name, *coordinates)


class RngSource(Protocol):
    """One generator of this rank, or several that belong together. All methods are local."""

    def capture(self) -> Any:
        """Return the state as values that the codec knows. Later draws do not change them."""

    def restore(self, state: Any) -> None:
        """Continue from a state that `capture` returned.

        Raises:
            MismatchError: the state is of another kind or another number of generators.
        """

    def reseed(self, seeds: Seeds) -> None:
        """Begin a new stream."""


class PythonRng:
    """The generator that is used by the functions of Python's `random`. All methods are local."""

    def capture(self) -> Any:
        """Return version, words and the spare normal number."""
        version, words, spare = random.getstate()
        return {"version": version, "words": np.array(words, np.uint32), "spare": spare}

    def restore(self, state: Any) -> None:
        """Set the state."""
        random.setstate((state["version"], tuple(int(word) for word in state["words"]), state["spare"]))

    def reseed(self, seeds: Seeds) -> None:
        """Seed it; it differs along dp."""
        random.seed(seeds.of("python", DATA_AXES))


class NumpyRng:
    """The generator that is used by the functions of `numpy.random`. All methods are local."""

    def capture(self) -> Any:
        """Return numpy's legacy state."""
        return dict(np.random.get_state(legacy=False))

    def restore(self, state: Any) -> None:
        """Set the state."""
        np.random.set_state(state)

    def reseed(self, seeds: Seeds) -> None:
        """Seed it; it differs along dp."""
        np.random.seed(seeds.of("numpy", DATA_AXES) % 2**32)


@dataclass(frozen=True, slots=True)
class NumpyGenerator:
    """A `numpy.random.Generator`. Its state changes; the object stays the same. All methods are local.

    Attributes:
        generator: the generator.
        name: makes its fresh seeds differ from those of other generators.
        axes: along which its fresh seeds differ.
    """

    generator: np.random.Generator
    name: str = "numpy generator"
    axes: tuple[str, ...] = DATA_AXES

    def capture(self) -> Any:
        """Return the state of its bit generator."""
        return dict(self.generator.bit_generator.state)

    def restore(self, state: Any) -> None:
        """Set the state.

        Raises:
            MismatchError: the state is that of another class of bit generator.
        """
        ours = type(self.generator.bit_generator).__name__
        if state["bit_generator"] != ours:
            raise MismatchError(
                f"The state of {self.name!r} was saved from a {state['bit_generator']}, and the generator "
                f"here is a {ours}. Make it from the bit generator that it was saved with."
            )
        self.generator.bit_generator.state = state

    def reseed(self, seeds: Seeds) -> None:
        """Copy the state of a new bit generator of the same class."""
        bit_generator_class: Any = type(self.generator.bit_generator)
        self.generator.bit_generator.state = bit_generator_class(seeds.of(self.name, self.axes)).state


@dataclass(frozen=True, slots=True)
class TorchRng:
    """torch's default generator on the CPU, or a `torch.Generator` on any device. All methods are local.

    Attributes:
        generator: the generator; None for the default one.
        name: makes its fresh seeds differ from those of other generators.
        axes: along which its fresh seeds differ.
    """

    generator: torch.Generator | None = None
    name: str = "torch"
    axes: tuple[str, ...] = ACTIVATION_AXES

    def capture(self) -> Any:
        """Return the state, a `uint8` tensor on the CPU."""
        return (self.generator or torch.default_generator).get_state()

    def restore(self, state: Any) -> None:
        """Set the state.

        Raises:
            MismatchError: the state is that of a generator on another kind of device.
        """
        generator = self.generator or torch.default_generator
        if state.numel() != generator.get_state().numel():
            raise MismatchError(
                f"The state of {self.name!r} has {state.numel()} bytes, which does not fit the generator "
                f"here, on {generator.device}. Make it on the kind of device that it was saved on."
            )
        generator.set_state(state)

    def reseed(self, seeds: Seeds) -> None:
        """Seed it."""
        (self.generator or torch.default_generator).manual_seed(seeds.of(self.name, self.axes))


class CudaRng:
    """torch's default generators of all CUDA devices that this process sees; there may be none.

    All methods are local.
    """

    def capture(self) -> Any:
        """Return a state for each device, `uint8` tensors on the CPU."""
        return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self, state: Any) -> None:
        """Set the state of each device.

        Raises:
            MismatchError: this process sees another number of devices.
        """
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if len(state) != devices:
            raise MismatchError(
                f"There are CUDA random states of {len(state)} devices, and this process sees {devices}. "
                f"Start it with as many visible devices (CUDA_VISIBLE_DEVICES) as when it was saved, or "
                f"leave the source out."
            )
        if devices:
            torch.cuda.set_rng_state_all(state)

    def reseed(self, seeds: Seeds) -> None:
        """Seed all devices equally, as `torch.manual_seed` does."""
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seeds.of("cuda", ACTIVATION_AXES))


class StatesTracker(Protocol):
    """Named random states, as Megatron's `CudaRNGStatesTracker` keeps them. Both methods are local."""

    def get_states(self) -> dict[str, Any]:
        """Return the states by name: uint8 tensors, or generators."""

    def set_states(self, states: dict[str, Any]) -> None:
        """Replace them."""


@dataclass(frozen=True, slots=True)
class TrackedRng:
    """The named states of Megatron's tensor-parallel tracker. All methods are local.

    Attributes:
        tracker: the tracker.
        axes: by name of each state, the axes along which its fresh seeds differ. A name that is added with
            `tracker.add` needs an entry.
    """

    tracker: StatesTracker
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: TRACKED_AXES)

    def capture(self) -> Any:
        """Return copies of the states by name."""
        return {
            name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
            for name, state in self.tracker.get_states().items()
        }

    def restore(self, state: Any) -> None:
        """Set the states. Where the tracker has a generator, the object stays and its state changes.

        Raises:
            MismatchError: the tracker has other names.
        """
        ours = self.tracker.get_states()
        if ours and ours.keys() != state.keys():
            raise MismatchError(
                f"The tracker's states were saved as {', '.join(sorted(state))}, and here they are "
                f"{', '.join(sorted(ours))}. Add the same ones before resuming."
            )
        self._set({name: stored.clone() for name, stored in state.items()})

    def reseed(self, seeds: Seeds) -> None:
        """Seed each state.

        Raises:
            DeclarationError: `axes` has no entry for a state of the tracker.
        """
        fresh = {}
        for name, state in self.tracker.get_states().items():
            if name not in self.axes:
                raise DeclarationError(
                    f"The tracker has a random state {name!r}, and it is not known along which axes it "
                    f'differs. Give TrackedRng(tracker, axes={{**TRACKED_AXES, {name!r}: ("pp", "tp")}}), '
                    f"with the axes of this state."
                )
            generator = torch.Generator(device=_device_of(state))
            fresh[name] = generator.manual_seed(seeds.of(name, self.axes[name])).get_state()
        self._set(fresh)

    def _set(self, states: dict[str, Any]) -> None:
        ours = self.tracker.get_states()
        for name, state in states.items():
            if isinstance(ours.get(name), torch.Generator):
                ours[name].set_state(state)
                states = {**states, name: ours[name]}
        self.tracker.set_states(states)


@dataclass(frozen=True, slots=True)
class ParallelStreams:
    """The streams of a `megackpt.training.parallel.ParallelRng`; fresh ones come from its own seed.

    All methods are local.
    """

    rng: ParallelRng

    def capture(self) -> Any:
        """Return its state dict."""
        return self.rng.state_dict()

    def restore(self, state: Any) -> None:
        """Load it."""
        self.rng.load_state_dict(state)

    def reseed(self, seeds: Seeds) -> None:
        """Reseed it for the step."""
        self.rng.reseed(seeds.step)


def sources_of_process(
    *,
    parallel: ParallelRng | None,
    tracker: StatesTracker | None,
    generators: Mapping[str, np.random.Generator],
) -> dict[str, RngSource]:
    """Return every generator of this process by name, including the given ones."""
    sources: dict[str, RngSource] = {
        "python": PythonRng(),
        "numpy": NumpyRng(),
        "torch": TorchRng(),
        "cuda": CudaRng(),
    }
    for name, generator in generators.items():
        sources[f"numpy.{name}"] = NumpyGenerator(generator, name)
    if parallel is not None:
        sources["parallel"] = ParallelStreams(parallel)
    if tracker is not None:
        sources["tracker"] = TrackedRng(tracker)
    return sources


def _device_of(state: Any) -> torch.device:
    """Return the device of the generator whose state this is."""
    if isinstance(state, torch.Generator):
        return state.device
    # The states of CPU and CUDA generators have different lengths.
    is_cpu = state.numel() == torch.default_generator.get_state().numel()
    return torch.device("cpu" if is_cpu else "cuda")
