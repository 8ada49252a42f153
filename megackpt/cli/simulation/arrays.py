"""The global arrays of a job: parameters, and what an optimizer keeps of each.

Their keys, dtypes and shapes follow from a model and from tp, because vocabularies are padded to tp.
Keys of optimizer state are those of `megackpt.training.optim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megackpt.cli.simulation.model import Model, Weight
from megackpt.plans.metadata import DTYPES, ArraySpec
from megackpt.training.parallel.embedding import padded_vocab_size

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "fp32_param"
STEP = "step"


@dataclass(frozen=True, slots=True, eq=False)
class JobArrays:
    """All arrays of a job.

    Attributes:
        specs: the arrays, sorted by key.
        number: position there by key.
        states: what an optimizer keeps for each element, by name; empty: it is not stored.
        tp: what vocabularies are padded for.
    """

    specs: tuple[ArraySpec, ...]
    number: Mapping[str, int]
    states: tuple[str, ...]
    tp: int

    @property
    def dims(self) -> int:
        """Dims of the widest array; at least 1."""
        return max([len(spec.global_shape) for spec in self.specs], default=1) or 1

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, padding of vocabularies included."""
        return sum(spec.nbytes for spec in self.specs)

    def of_part(self, weight: Weight, name: str) -> list[int]:
        """Return the numbers of a part's array and of its states, in the order of `states`."""
        key = part_key(weight, name)
        if not weight.is_trained:
            return [self.number[key]] * (1 + len(self.states))  # rows of states are left out elsewhere
        return [self.number[key], *(self.number[state_key(state, key)] for state in self.states)]

    def step_of(self, weight: Weight) -> int:
        """Return the number of the array with the updates that a parameter has had."""
        return self.number[state_key(STEP, weight.key)]


def job_arrays(model: Model, *, tp: int, states: tuple[str, ...] | None = None) -> JobArrays:
    """Return the arrays of a job that trains a model. Pure.

    states are what an optimizer keeps for each element, besides a count for each parameter; none: nothing is
    stored of an optimizer; None: those of Adam. Parameters of two bytes have a master copy of four, which
    the moments are like; others are their own.
    """
    if states is None:
        is_narrow = any(DTYPES[weight.dtype].itemsize < 4 for weight, _ in model.weights())
        states = (MASTER, *MOMENTS) if is_narrow else MOMENTS
    specs: dict[str, ArraySpec] = {}
    for weight, axes in model.weights():
        is_narrow = DTYPES[weight.dtype].itemsize < 4
        wide = "float32" if is_narrow else weight.dtype
        for name, extent in weight.parts:
            key, rows = part_key(weight, name), padded_rows(weight, extent, model, tp)
            experts = (weight.experts,) if weight.experts else ()
            shape = (*axes, *experts, rows, *weight.inner)
            specs[key] = ArraySpec(key, weight.dtype, shape)
            for state in states if weight.is_trained else ():
                specs[state_key(state, key)] = ArraySpec(state_key(state, key), wide, shape)
        if states and weight.is_trained:
            key = state_key(STEP, weight.key)
            specs[key] = ArraySpec(key, "float32", axes)
    keys = sorted(specs)
    return JobArrays(tuple(specs[k] for k in keys), {k: i for i, k in enumerate(keys)}, states, tp)


def padded_rows(weight: Weight, extent: int, model: Model, tp: int) -> int:
    """Return the extent of dim 0 with the padding of a vocabulary."""
    if not weight.is_vocabulary:
        return extent
    return padded_vocab_size(extent, tp=tp, make_divisible=model.vocab_multiple)


def part_key(weight: Weight, name: str) -> str:
    """Return the key of a part."""
    return f"{weight.key}.{name}" if name else weight.key


def state_key(state: str, key: str) -> str:
    """Return the key of an optimizer's state of what is stored under key."""
    return f"optimizer.state.{state}.{key}"
