"""The global arrays of a job: parameters of a model, and what an optimizer keeps of each.

Their keys, dtypes and shapes follow from a model and from tp, because vocabularies are padded to tp.
Keys of optimizer state are those of `megackpt.training.optim`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megackpt.cli.simulation.layout import layout_title
from megackpt.errors import DeclarationError, truncated_list
from megackpt.plans.metadata import DTYPES, ArraySpec
from megackpt.training.parallel import ParallelLayout
from megackpt.training.parallel.embedding import padded_vocab_size

# The parameters of a model: names, shapes, and which dim tp cuts.
#
# A parameter is described before a layout is chosen; a check says whether a layout is possible for the model.
# `transformer` and `stored` make the parameters.


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter, of one layer (and one expert) where there are several.

    Attributes:
        key: its key without that of a part.
        parts: named parts along dim 0, one after the other, and their extents over all of tp; one of the
            empty name where it is not fused.
        inner: extents of the dims behind it; empty for a vector.
        tp_dim: the dim that tp cuts; None: every rank of tp has all of it.
        experts: extent of the axis over experts, behind that of the layers; 0: it is no expert's. Experts are
            stacked in one parameter, and `tp_dim` is cut over etp.
        is_vocabulary: whether dim 0 is padded to what tp divides.
        dtype: of the parameter; its master copy and moments follow from it.
        is_trained: whether an optimizer has state for it; False for a buffer.
    """

    key: str
    parts: tuple[tuple[str, int], ...]
    inner: tuple[int, ...] = ()
    tp_dim: int | None = None
    experts: int = 0
    is_vocabulary: bool = False
    dtype: str = "bfloat16"
    is_trained: bool = True

    @property
    def numel(self) -> int:
        """Elements over all of tp and of all experts, without padding."""
        rows = sum(extent for _, extent in self.parts)
        return rows * math.prod(self.inner) * (self.experts or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Equal layers.

    Attributes:
        layers: how many.
        weights: the parameters of each.
        has_axis: whether arrays have a leading axis of `layers`; without it there is one layer.
    """

    layers: int
    weights: tuple[Weight, ...]
    has_axis: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """All parameters, by where they stand.

    Attributes:
        first: parameters of the first stage besides its layers.
        stacks: the layers, in order.
        last: parameters of the last stage besides its layers.
        shared: the parameter of the first stage that the last one holds a second copy of, if there is one.
        vocab_multiple: rows of a vocabulary on each tp rank are a multiple of this.
        ends_count_as_layers: whether first and last count as a layer each when layers are split over stages.
        heads: what tp has to divide besides the extents that it cuts, by name.
        query_groups: key and value heads; None: not known, or none. With more ranks in tp than there are,
            neighbouring ranks hold the same one.
    """

    first: tuple[Weight, ...]
    stacks: tuple[Stack, ...]
    last: tuple[Weight, ...]
    shared: Weight | None = None
    vocab_multiple: int = 1
    ends_count_as_layers: bool = False
    heads: Mapping[str, int] = field(default_factory=dict)
    query_groups: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers over all stages."""
        return sum(stack.layers for stack in self.stacks)

    def weights(self) -> Iterator[tuple[Weight, tuple[int, ...]]]:
        """Yield all parameters, each with the extents of its leading axes over layers."""
        for weight in (*self.first, *self.last):
            yield weight, ()
        for stack in self.stacks:
            for weight in stack.weights:
                yield weight, (stack.layers,) if stack.has_axis else ()

    def copies_of(self, part: str, *, tp: int) -> int:
        """Return how many neighbouring ranks of tp hold the same slice of a part.

        Source: `megackpt.training.parallel.QKVParallelLinear`.
        """
        groups = self.query_groups
        return tp // groups if part in ("k", "v") and groups is not None and tp % groups == 0 else 1

    @property
    def numel(self) -> int:
        """Number of parameters, without padding; what is held twice counts once."""
        ends = sum(weight.numel for weight in (*self.first, *self.last))
        return ends + sum(stack.layers * w.numel for stack in self.stacks for w in stack.weights)


def check_layout(model: Model, layout: ParallelLayout) -> None:
    """Check that a layout can hold a model. Pure.

    Raises:
        DeclarationError: tp (etp, in experts) does not divide heads or an extent that it cuts, neither of tp
            and the query groups divides the other, ep does not divide the experts, or there are more stages
            than layers; all of them are named.
    """
    faults = [*_tp_faults(model, layout), *_expert_faults(model, layout), *_stage_faults(model, layout)]
    if faults:
        lines = truncated_list(list(dict.fromkeys(faults)))
        raise DeclarationError(f"The model does not fit {layout_title(layout)}:\n{lines}\nChange either.")


def _tp_faults(model: Model, layout: ParallelLayout) -> list[str]:
    tp = layout.tp
    faults = [f"{name} {n} is not a multiple of tp={tp}" for name, n in model.heads.items() if n % tp]
    groups = model.query_groups
    if groups is not None and groups % tp and tp % groups:
        faults.append(f"neither of query_groups {groups} and tp={tp} divides the other")
    for weight, _ in model.weights():
        axis, size = ("etp", layout.etp) if weight.experts else ("tp", tp)
        faults += [
            f"{weight.key} has {extent} along the dim that {axis}={size} cuts"
            for extent, copies in _cut_extents(weight, model, size)
            if extent * copies % size
        ]
    return faults


def _expert_faults(model: Model, layout: ParallelLayout) -> list[str]:
    experts = {weight.experts for weight, _ in model.weights() if weight.experts}
    faults = [f"{n} experts cannot be shared by ep={layout.ep}" for n in sorted(experts) if n % layout.ep]
    if layout.ep > 1 and not experts:
        faults.append(f"there are no experts to share by ep={layout.ep}")
    return faults


def _stage_faults(model: Model, layout: ParallelLayout) -> list[str]:
    stages = layout.pp * layout.vpp
    if stages <= max(model.layers, 1):
        return []
    virtual = f" x vpp={layout.vpp}" if layout.vpp > 1 else ""
    return [f"{model.layers} layers are fewer than pp={layout.pp}{virtual} stages"]


def _cut_extents(weight: Weight, model: Model, tp: int) -> list[tuple[int, int]]:
    """Return the extents that tp cuts, each with the number of neighbours that hold the same slice."""
    if weight.tp_dim is None or weight.is_vocabulary:
        return []
    if weight.tp_dim:
        return [(weight.inner[weight.tp_dim - 1], 1)]
    return [(extent, model.copies_of(name, tp=tp)) for name, extent in weight.parts]


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

    states are what an optimizer keeps for each element, with a count for each parameter; none: nothing is
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
