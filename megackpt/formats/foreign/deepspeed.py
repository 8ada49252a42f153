"""Reads a folder that DeepSpeed's ZeRO has saved, without DeepSpeed and without running its pickles.

ZeRO-1 and ZeRO-2 concatenate the parameters of a group, and each rank saves one stretch of that. ZeRO-3 cuts
each parameter by itself, into equal parts, and pads the last one.

Source: DeepSpeed 0.19.8, `deepspeed/utils/zero_to_fp32.py` and the `state_dict()`s of `runtime/zero`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from megackpt.codec import ForeignMember
from megackpt.errors import FormatError, NotACheckpointError, UnsupportedError
from megackpt.formats.file_names import DEEPSPEED
from megackpt.formats.folder_kinds import recognise_names
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.formats.foreign.mapped_memory import in_memory
from megackpt.formats.foreign.state import (
    MASTER,
    ForeignState,
    NamedParam,
    NamedTrainingState,
    StoredWeight,
    have_equal_bits,
)
from megackpt.formats.foreign.strategy import ForeignLoadStrategy, first_gap, folder_of_latest, layout_errors
from megackpt.formats.strategy import Format


class DeepSpeedLoadStrategy(ForeignLoadStrategy):
    """Reads a folder of ZeRO-1, 2 or 3.

    Args:
        keys: "megackpt" for the names of megackpt's layers and optimizers, "torch" for those of torch; see
            `megackpt.import_deepspeed`.
        weights: "model" for weights in the precision of the model, "masters" in that of the optimizer.
        prefix: with the keys of megackpt, what each parameter's name begins with.
    """

    backend = "deepspeed"
    file_names = DEEPSPEED

    def __init__(self, keys: str = "megackpt", weights: str = "model", prefix: str = "") -> None:
        self._keys, self._weights, self._prefix = keys, weights, prefix

    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return what the files hold."""
        named = read_deepspeed(path, checks_bytes=checks_bytes)
        return named.state(self._keys, weights=self._weights, prefix=self._prefix)


FORMAT = Format(backend="deepspeed", version=1, load=DeepSpeedLoadStrategy)

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")

# Of the model file, the entries that DeepSpeed itself writes; the others are the user's client state.
_OWN_ENTRIES = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info",
    "autoep_layers",
})  # fmt: skip
_LEAST_COMPARED = 3  # elements of a part: fewer may be equal on two ranks by chance
_MAX_DIMS, _MAX_NUMEL = 64, 2**62
_STAGES = {"optimizer_states": 1, "gradients": 2, "weights": 3}  # of DeepSpeed's ZeroStageEnum
_KEPT_ENTRIES = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")


@dataclass(frozen=True, slots=True)
class _Group:
    """One flat group of parameters, as all ranks have saved it.

    Attributes:
        masters: of each rank, without padding.
        states: of each rank: its states by name, with the masters' length or more, or numbers.
    """

    masters: tuple[Tensor, ...]
    states: tuple[Mapping[str, Any], ...]

    def vectors(self, name: str) -> list[Tensor]:
        """Return the masters, or a state without padding, of each rank."""
        if name == MASTER:
            return list(self.masters)
        vectors = [
            state[name].reshape(-1)[: len(master)]
            for state, master in zip(self.states, self.masters, strict=True)
        ]
        if any(len(vector) < len(master) for vector, master in zip(vectors, self.masters, strict=True)):
            raise ValueError(f"{name!r:.80} is shorter than its masters")
        return vectors

    def names(self) -> tuple[str, ...]:
        """Return the names of masters and states that have a value for each element."""
        return (MASTER, *(name for name, value in self.states[0].items() if _is_vector(value)))


def _is_vector(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def read_deepspeed(path: str, *, checks_bytes: bool) -> NamedTrainingState:
    """Read the files of one step; arrays stay in the files, which are mapped.

    Args:
        path: the folder that was given to `save_checkpoint`, or the folder of one step.
        checks_bytes: whether to compare checksums, for which all bytes are read.

    Raises:
        NotACheckpointError: there is no step of DeepSpeed.
        UnsupportedError: the step has model parallelism or experts, is a universal checkpoint, or was not
            saved by ZeRO.
        FormatError: files are missing or damaged, or contradict each other.
    """
    folder = folder_of_latest(path, "latest")
    model_files, optimizer_files = _find_files(folder)
    model = _load(model_files[0], ("module", "param_shapes"), checks_bytes=checks_bytes)
    models = [model, *(_load(f, ("module",), checks_bytes=checks_bytes) for f in model_files[1:])]
    saved = [
        _load(f, ("optimizer_state_dict",), checks_bytes=checks_bytes)["optimizer_state_dict"]
        for f in optimizer_files
    ]
    step = _Step(folder, models, saved)
    with layout_errors(folder, tool="ZeRO"):
        state = step.read()
    if checks_bytes:
        step.check_masters(state)
    return state


def _find_files(folder: str) -> tuple[list[str], list[str]]:
    """Return the files of the model and of the optimizer, by rank."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    # ZeRO-1 and 2 write one file of the model, without a data-parallel rank; ZeRO-3 writes one for each rank.
    models = {int(m[1] or 0): name for name in names if (m := _MODEL_FILE.fullmatch(name))}
    optimizers = {int(m[1]): name for name in names if (m := _OPTIMIZER_FILE.fullmatch(name))}
    if not models:
        raise NotACheckpointError(
            f"{folder} has no '*_model_states.pt' of DeepSpeed. Name the folder that was given to "
            f"save_checkpoint(), which has a file 'latest', or the folder of one step in it.",
            path=folder,
        )
    # Before files are counted: those of several tensor ranks have one number in `models`.
    _check_data_parallel(folder, names)
    if os.path.isdir(os.path.join(folder, "zero")):
        raise UnsupportedError(
            f"{folder} is a universal checkpoint of DeepSpeed, which is not read. Import the ZeRO folder "
            f"that it was made from. If that has model parallelism, load the universal checkpoint with "
            f"DeepSpeed into a model without it, and save a ZeRO folder.",
            path=folder,
        )
    if not optimizers:
        raise UnsupportedError(
            f"{folder} has no '*_optim_states.pt', so it was saved without ZeRO (stage 0), or only in part. "
            f"Import a stage 0 folder with import_torch (--from torch) instead.",
        )
    for of_rank, pattern in ((optimizers, _OPTIMIZER_FILE), (models, _MODEL_FILE)):
        _check_one_each(folder, [name for name in names if pattern.fullmatch(name)], of_rank)
    _check_ranks(folder, list(optimizers), "zero_pp_rank_{}_mp_rank_00_optim_states.pt")
    _check_ranks(folder, list(models), "zero_pp_rank_{}_mp_rank_00_model_states.pt")
    return (
        [os.path.join(folder, models[rank]) for rank in sorted(models)],
        [os.path.join(folder, optimizers[rank]) for rank in sorted(optimizers)],
    )


def _check_data_parallel(folder: str, names: Sequence[str]) -> None:
    """Check by the names of the files that parameters are cut by nothing but ZeRO."""
    if any(re.match(r"layer_\d+-model_\d", name) for name in names):
        seen = recognise_names(names, where=folder)
        assert seen is not None
        raise UnsupportedError(f"{folder} is {seen.name}. {seen.advice}")
    parallel = [m[2] for name in names if (m := _MODEL_FILE.fullmatch(name)) and int(m[2])]
    other = [name for name in names if re.match(r"layer_\d|.*expert_\d", name)]
    if parallel or other:
        what = "tensor parallelism" if parallel else f"pipeline stages or experts ({other[0]})"
        raise UnsupportedError(
            f"{folder} was saved with {what}. DeepSpeed then stores parts of parameters, and the files do "
            f"not say which parts. Make a universal checkpoint with DeepSpeed's ds_to_universal.py, load "
            f"that with DeepSpeed into a model without it, and save a ZeRO folder.",
        )


def _check_one_each(folder: str, names: Sequence[str], of_rank: Mapping[int, str]) -> None:
    """Check that no two files are of one rank: one of them would be left out."""
    left_out = next((name for name in names if name not in of_rank.values()), None)
    if left_out is not None:
        match = _OPTIMIZER_FILE.fullmatch(left_out) or _MODEL_FILE.fullmatch(left_out)
        rank = int((match and match[1]) or 0)
        raise FormatError(
            f"{folder}: {left_out:.200} and {of_rank[rank]:.200} are of one rank, and one of them would be "
            f"left out. Move the one that is not of this step away.",
            path=folder,
        )


def _check_ranks(folder: str, ranks: Sequence[int], name: str) -> None:
    missing = first_gap(ranks)
    if missing is not None:
        others = max(ranks) - len(ranks)
        raise FormatError(
            f"{folder}: {name.format(missing)} is missing, and {others:.6g} others. Copy the files of all "
            f"ranks into one folder.",
            path=folder,
        )


def _load(path: str, entries: Sequence[str], *, checks_bytes: bool) -> Mapping[str, Any]:
    value: Mapping[str, Any] = load_mapped_file(path, checks_bytes=checks_bytes)
    for entry in entries:
        if not isinstance(value, dict) or value.get(entry) is None:
            raise FormatError(
                f"{path}: it has no {entry!r}, so DeepSpeed's ZeRO did not write it. Name the folder of one "
                f"step of save_checkpoint().",
                path=path,
            )
    return value


@dataclass(frozen=True, slots=True)
class _Step:
    """The loaded files of one step, by rank."""

    folder: str
    models: Sequence[Mapping[str, Any]]
    saved: Sequence[Mapping[str, Any]]

    def read(self) -> NamedTrainingState:
        """Find every parameter in the flat groups."""
        model = self.models[0]
        self._check_rank_count()
        options = self._options()
        left = [
            f"{name!r} of the model (not a tensor)"
            for name, v in model["module"].items()
            if not isinstance(v, Tensor)
        ]
        own = {name: model[name] for name in _KEPT_ENTRIES if model.get(name) is not None}
        client = {name: value for name, value in model.items() if name not in _OWN_ENTRIES}
        return NamedTrainingState(
            weights={**self._whole_weights(), **self._frozen()},
            dtypes={name: v.dtype for name, v in model["module"].items() if isinstance(v, Tensor)},
            params=self._params(options),
            aliases=dict(model.get("shared_params") or {}),
            groups=[{k: v for k, v in group.items() if k != "params"} for group in options],
            others={"deepspeed": {**own, "client_state": client}},
            origin=f"DeepSpeed {model.get('ds_version')}, ZeRO-{self._stage()}, {len(self.saved)} ranks",
            left_out=left,
            where=self.folder,
        )

    def _params(self, options: Sequence[Mapping[str, Any]]) -> dict[str, NamedParam]:
        """Cut every parameter out of the flat groups; options are those of the torch optimizer."""
        shapes = self._shapes()
        groups = self._groups()
        if len(shapes) != len(groups):
            raise ValueError(f"{len(shapes)} groups of shapes, and {len(groups)} of values")
        stretches = dict(
            self._cut_groups(shapes, groups) if self._is_zero_3 else self._cut_flat(shapes, groups)
        )
        group_of = self._group_of(options)
        return {
            name: NamedParam(
                shape=shape,
                states=stretches[name],
                numbers={k: v for k, v in groups[i].states[0].items() if not _is_vector(v)},
                group=group_of[i],
            )
            for i, of in enumerate(shapes)
            for name, shape in of.items()
        }

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the shapes of the parameters of each group, which the weights and all ranks must have."""
        module = self.models[0]["module"]
        of_ranks = [[list(of.items()) for of in model.get("param_shapes") or []] for model in self.models]
        if any(shapes != of_ranks[0] for shapes in of_ranks):
            raise ValueError("ranks have other shapes of parameters, or in another order")
        shapes = [{name: _shape(shape) for name, shape in of} for of in of_ranks[0]]
        names = [name for of in shapes for name in of]
        if len(set(names)) < len(names):
            raise ValueError("a parameter is in two groups")
        for name, shape in chain.from_iterable(of.items() for of in shapes):
            stored = tuple(module[name].shape)
            # Of a weight that ZeRO-3 cuts, the module has a tensor without elements.
            if stored != shape and not (self._is_zero_3 and 0 in stored):
                raise ValueError(f"{name!r:.200} has shape {stored}, and {shape} in param_shapes")
        return shapes

    def check_masters(self, state: NamedTrainingState) -> None:
        """Compare each weight that a file has as a whole with what its master is rounded to.

        It finds shapes in another order than the values, and files of other ranks or steps, which nothing
        else in the files shows. ZeRO-3 cuts weights, so of its files only copies of another rank's are found.

        Raises:
            FormatError: a weight is another one.
        """
        for name, param in state.params.items():
            weight = state.weights.get(name)
            if weight is None:  # ZeRO-3 stores masters only
                self._check_not_copied(param)
                continue
            (values,) = weight.parts
            rounded = torch.cat([in_memory(part).to(values.dtype) for part in param.states[MASTER]])
            stored = in_memory(values).reshape(-1)
            # A run that has diverged has NaN in both, which is equal to nothing.
            if not ((rounded == stored) | (rounded.isnan() & stored.isnan())).all():
                raise FormatError(
                    f"{self.folder}: the weight {name!r} is not its master in the optimizer's files, rounded "
                    f"to {values.dtype}. The files are of different steps or ranks, or damaged. Copy all of "
                    f"them again; if the script changes weights after its step, import without verifying.",
                    key=name,
                    path=self.folder,
                )

    def _check_not_copied(self, param: NamedParam) -> None:
        """Check that not all states of two ranks' parts of a parameter are equal.

        Raises:
            FormatError: they are, and have more than one value, so that this is no chance.
        """
        parts = list(zip(*param.states.values(), strict=False))  # the last part may be shorter
        for before, after in pairwise(parts):
            read = map(in_memory, after)
            is_constant = all(len(data) == 0 or bool((data == data[0]).all()) for data in read)
            length = len(after[0])
            if length < _LEAST_COMPARED or is_constant:
                continue
            if all(have_equal_bits(a[:length], b) for a, b in zip(before, after, strict=True)):
                raise FormatError(
                    f"{self.folder}: two ranks have equal masters and moments, so the optimizer's file of "
                    f"one is a copy of another rank's. Copy the files of all ranks again; if the ranks do "
                    f"have equal parts, import without verifying.",
                    path=self.folder,
                )

    @property
    def _is_zero_3(self) -> bool:
        return "fp32_flat_groups" in self.saved[0]

    def _stage(self) -> str:
        stage: Any = self.saved[0].get("zero_stage")
        if isinstance(stage, ForeignMember):  # Python 3.11.0 to 3.11.3 stores the name of a member
            stage = _STAGES.get(stage.name or "", stage.value)
        # A number, or the stand-in for a member of DeepSpeed's enumeration, which is made from the number.
        number = getattr(stage, "args", [stage])[0]
        return "3" if self._is_zero_3 else str(int(number or 1))

    def _check_rank_count(self) -> None:
        counts = self.saved[0]["partition_count"]
        # ZeRO-1 and 2 store the count of each group, ZeRO-3 one number.
        ranks = max(counts) if isinstance(counts, list) else counts
        if ranks != len(self.saved):
            raise FormatError(
                f"{self.folder}: it was saved by {ranks} ranks, and has the optimizer files of "
                f"{len(self.saved)}. Copy the files of all ranks into one folder.",
                path=self.folder,
            )
        if isinstance(counts, list) and min(counts) != ranks:
            raise UnsupportedError(f"{self.folder}: groups are cut over {counts} ranks, as experts are.")

    def _groups(self) -> list[_Group]:
        name = "fp32_flat_groups" if self._is_zero_3 else "single_partition_of_fp32_groups"
        masters = [[tensor.detach().reshape(-1) for tensor in of_rank[name]] for of_rank in self.saved]
        states = [self._states_of(of_rank) for of_rank in self.saved]
        return [
            # An optimizer that has made no step has no states.
            _Group(tuple(of[i] for of in masters), tuple(of.get(i, {}) for of in states))
            for i in range(len(masters[0]))
        ]

    def _base(self, of_rank: Mapping[str, Any]) -> Any:
        return of_rank["optimizer_state_dict" if self._is_zero_3 else "base_optimizer_state"]

    def _states_of(self, of_rank: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Return the states of each group; with `elastic_checkpoint` they are a list, in order."""
        base = self._base(of_rank)
        return dict(enumerate(base)) if isinstance(base, list) else dict(base["state"])

    def _options(self) -> list[Mapping[str, Any]]:
        """Return the groups of the torch optimizer; with `elastic_checkpoint` none are stored."""
        base = self._base(self.saved[0])
        return [] if isinstance(base, list) else list(base["param_groups"])

    def _group_of(self, options: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Return the number of the optimizer's group of each flat group: ZeRO-3 may have several for one."""
        if not options:
            return {i: i for i in range(len(self.models[0]["param_shapes"]))}
        return {i: number for number, group in enumerate(options) for i in group["params"]}

    def _cut_flat(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], groups: Sequence[_Group]
    ) -> Iterator[tuple[str, dict[str, list[Tensor]]]]:
        """Yield each parameter's stretches by state, of ZeRO-1 and 2: in the flat group, over all ranks."""
        # A file without paddings has the parameters of a group one directly after the other.
        paddings = self.saved[0].get("param_alignment_paddings") or [[0] * len(of) for of in shapes]
        for of, group, padding in zip(shapes, groups, paddings, strict=True):
            vectors = {name: group.vectors(name) for name in group.names()}
            at = 0
            for (name, shape), after in zip(of.items(), padding, strict=True):
                stop = at + math.prod(shape)
                yield name, {k: list(_stretch(of_ranks, at, stop)) for k, of_ranks in vectors.items()}
                at = stop + after
            stored = sum(map(len, group.masters))
            if at != stored:
                raise ValueError(f"{stored} values of a group, and shapes of {at}")

    def _cut_groups(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], groups: Sequence[_Group]
    ) -> Iterator[tuple[str, dict[str, list[Tensor]]]]:
        """Yield each parameter's stretches by state, of ZeRO-3: an equal part of each rank's group."""
        ranks = len(self.saved)
        for of, group in zip(shapes, groups, strict=True):
            vectors = {name: group.vectors(name) for name in group.names()}
            at = 0
            for name, shape in of.items():
                # The part of the last rank may end with padding, which `_stretch` leaves out.
                length = -(-math.prod(shape) // ranks)
                yield (
                    name,
                    {
                        k: list(_stretch([v[at : at + length] for v in of_ranks], 0, math.prod(shape)))
                        for k, of_ranks in vectors.items()
                    },
                )
                at += length
            for master in group.masters:
                if len(master) != at:
                    raise ValueError(f"{len(master)} values of a group on a rank, and shapes of {at}")

    def _whole_weights(self) -> dict[str, StoredWeight]:
        """Return weights and buffers that a file has as a whole; ZeRO-3 has buffers and small weights."""
        module = self.models[0]["module"]
        shapes = dict(chain.from_iterable(of.items() for of in self.models[0]["param_shapes"]))
        shapes |= {n: _shape(s) for n, s in (self.models[0].get("frozen_param_shapes") or {}).items()}
        whole = {}
        for name, value in module.items():
            # A weight that ZeRO-3 cuts has a tensor without elements here, so its shape differs.
            if isinstance(value, Tensor) and tuple(value.shape) == tuple(shapes.get(name, value.shape)):
                whole[name] = StoredWeight(tuple(value.shape), [value])
        aliases = self.models[0].get("shared_params") or {}
        # In ZeRO-3 a second name of a weight has no elements, as the first.
        return {
            name: v
            for name, v in whole.items()
            if math.prod(v.shape) or aliases.get(name, name) not in shapes
        }

    def _frozen(self) -> dict[str, StoredWeight]:
        """Return the frozen weights, which ZeRO-3 cuts as all others."""
        shapes = self.models[0].get("frozen_param_shapes") or {}
        fragments = [of.get("frozen_param_fragments") or {} for of in self.models]
        if not self._is_zero_3:
            return {}
        return {
            name: StoredWeight(
                shape, list(_stretch([of[name].reshape(-1) for of in fragments], 0, math.prod(shape)))
            )
            for name, shape in ((name, _shape(value)) for name, value in shapes.items())
        }


def _stretch(vectors: Sequence[Tensor], start: int, stop: int) -> Iterator[Tensor]:
    """Yield the parts of vectors that have the elements from start to stop of all of them in a row."""
    ends = list(accumulate(map(len, vectors)))
    if stop > (ends[-1] if ends else 0):
        raise ValueError(f"values end at {ends[-1] if ends else 0}, and a parameter at {stop}")
    for vector, end in zip(vectors, ends, strict=True):
        begin = end - len(vector)
        if begin < stop and start < end:
            yield vector[max(start - begin, 0) : min(stop, end) - begin]


def _shape(value: Any) -> tuple[int, ...]:
    """Return a shape of a file."""
    if not isinstance(value, list | tuple) or len(value) > _MAX_DIMS:
        raise ValueError("a shape is none")
    if not all(type(n) is int and n >= 0 for n in value) or math.prod(value) >= _MAX_NUMEL:
        raise ValueError(f"no parameter has the shape {tuple(value)!r:.200}")
    return tuple(value)
