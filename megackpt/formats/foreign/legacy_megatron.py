"""Reads what Megatron-LM saves with `--ckpt-format torch`: a file for each tensor rank and stage.

`iter_0000100/mp_rank_01_003/model_optim_rng.pt` has the weights of tensor rank 1 and stage 3. The files say
neither along which dim a weight is cut, nor which layer of the model is the first one of a stage. Names and
arguments of the run do. The arrays have the names that Megatron-Core's `sharded_state_dict` gives them.

Source: Megatron-LM core_r0.16 `training/checkpointing.py`, and the layers' `sharded_state_dict`.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from megackpt.entities.tree import add_step, dotted, iter_leaves
from megackpt.errors import FormatError, NotACheckpointError, UnsupportedError
from megackpt.formats.file_names import LEGACY_MEGATRON
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.formats.foreign.state import CollectedArray, ForeignArray, ForeignState, SourcePart, plain_part
from megackpt.formats.foreign.strategy import ForeignLoadStrategy, folder_of_latest, layout_errors
from megackpt.formats.strategy import Format

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_FILE = "model_optim_rng.pt"
_CHUNK = re.compile(r"model\d*")  # several under an interleaved schedule
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_Rank: TypeAlias = tuple[int, int]  # the tensor rank and the stage
_OF_A_RANK = ("optimizer", "rng_state", "rerun_state_machine")

# Modules whose weights tensor parallelism cuts along dim 0 (and their biases), along dim 1, and not at all.
_COLUMN = {
    "word_embeddings", "output_layer", "linear_qkv", "query_key_value", "linear_q_proj", "linear_q_up_proj",
    "linear_kv_up_proj", "linear_fc1", "dense_h_to_4h",
}  # fmt: skip
_ROW = {"linear_proj", "dense", "linear_fc2", "dense_4h_to_h"}
_WHOLE = {"position_embeddings", "tokentype_embeddings", "linear_q_down_proj", "linear_kv_down_proj"}
_NEXT = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}  # in an MLP

# Norms that `sharded_state_dict` names as parts of the module after them, whether or not these are fused.
_NORMS = (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1"))


class LegacyMegatronLoadStrategy(ForeignLoadStrategy):
    """Reads the weights and arguments of one iteration, or of the newest in a folder of several."""

    backend = "megatron"
    file_names = LEGACY_MEGATRON

    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return the weights of all files as whole arrays, and the other values of the first file."""
        folder = folder_of_latest(
            path, "latest_checkpointed_iteration.txt", lambda n: f"iter_{int(n):07d}" if n.isdecimal() else n
        )
        files = _files(folder)
        with layout_errors(path, tool="Megatron-LM"):
            loaded = {at: _load(file, checks_bytes=checks_bytes) for at, file in files.items()}
            _check_ranks(folder, files, next(iter(loaded.values())).get("args"))
            return _state(files, loaded)


FORMAT = Format(backend="megatron", version=1, load=LegacyMegatronLoadStrategy)


def _files(folder: str) -> dict[_Rank, str]:
    """Return the files by tensor rank and stage."""
    files: dict[_Rank, str] = {}
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        match, path = _RANK.fullmatch(name), os.path.join(folder, name, _FILE)
        if match is not None and os.path.isfile(path):
            if match[3] is not None:
                raise _unsupported(path, "experts are divided over ranks")
            at = int(match[1]), int(match[2] or 0)
            if at in files:
                raise FormatError(
                    f"{folder}: {os.path.relpath(files[at], folder)} and {name}/{_FILE} are of one rank, and "
                    f"one of them would be left out. Move the one that is not of this step away.",
                    path=folder,
                )
            files[at] = path
    if not files:
        raise NotACheckpointError(
            f"{folder} has no mp_rank_*/{_FILE}. Name the folder of one iteration.", path=folder
        )
    return files


def _check_ranks(folder: str, files: Mapping[_Rank, str], args: Any) -> None:
    """Check that there is a file for each rank of the run."""
    tensor, stages = (max(at[i] for at in files) + 1 for i in (0, 1))
    tensor = max(tensor, getattr(args, "tensor_model_parallel_size", 0))
    stages = max(stages, getattr(args, "pipeline_model_parallel_size", 0))
    # One is enough: damaged arguments may name any number of ranks.
    at = next(((t, p) for p in range(stages) for t in range(tensor) if (t, p) not in files), None)
    if at is not None:
        raise FormatError(
            f"{folder}: the files of {tensor * stages - len(files)} ranks are missing, as "
            f"mp_rank_{at[0]:02d}_{at[1]:03d}. Copy those of all ranks into one folder.",
            path=folder,
        )


def _load(file: str, *, checks_bytes: bool) -> dict[str, Any]:
    value = load_mapped_file(file, checks_bytes=checks_bytes)
    if not isinstance(value, dict) or not any(map(_CHUNK.fullmatch, map(str, value))):
        raise FormatError(f"{file}: it has no 'model'. Megatron-LM did not write it.", path=file)
    return value


def _state(files: Mapping[_Rank, str], loaded: Mapping[_Rank, dict[str, Any]]) -> ForeignState:
    first = loaded[0, 0]
    args = first.get("args")
    is_tied = getattr(args, "untie_embeddings_and_output_weights", None) is False
    weights = _Weights(tensor_ranks=max(rank for rank, _ in files) + 1, is_tied=is_tied)
    weights.left_out += [f"{name} (it is of each rank)" for name in _OF_A_RANK if first.get(name) is not None]
    # All stages have their first chunks first.
    chunks = {name for value in loaded.values() for name in value if _CHUNK.fullmatch(str(name))}
    for chunk in sorted(chunks, key=lambda name: int(name[len("model") :] or 0)):
        for stage in sorted({stage for _, stage in files}):
            ranks = sorted(rank for rank, of in files if of == stage)
            weights.add_stage([(files[rank, stage], loaded[rank, stage].get(chunk, {})) for rank in ranks])
    rest = {k: v for k, v in first.items() if k not in ("args", *_OF_A_RANK) and not _CHUNK.fullmatch(str(k))}
    common = plain_part(rest, "", weights.left_out)
    if isinstance(args, argparse.Namespace):
        common["args"] = argparse.Namespace(**plain_part(vars(args), "args", weights.left_out))
    origin = f"Megatron-LM with --ckpt-format torch, {len(files)} ranks of TP and PP"
    return ForeignState(
        arrays=weights.joined_layers(),
        common=common,
        origin={"imported_from": origin},
        left_out=tuple(weights.left_out),
    )


@dataclass(slots=True, kw_only=True)
class _Weights:
    """The weights of all files, joined along the dims that tensor parallelism cuts.

    Attributes:
        tensor_ranks: how many there are.
        is_tied: whether the last stage has a copy of the embedding in place of an output layer.
        arrays: each weight by its name; layers have their numbers in the whole model.
        layers: of each stack, how many layers the stages and chunks so far have.
        left_out: what does not become part of the checkpoint, with the reason.
    """

    tensor_ranks: int
    is_tied: bool
    arrays: dict[str, CollectedArray] = field(default_factory=dict)
    layers: Counter[str] = field(default_factory=Counter)
    left_out: list[str] = field(default_factory=list)

    def add_stage(self, of_ranks: Collection[tuple[str, Any]]) -> None:
        """Add a model chunk of one stage: of each tensor rank, the file and its values."""
        numbers: dict[str, set[str]] = {}
        for rank, (file, chunk) in enumerate(of_ranks):
            values = {dotted(steps): value for steps, value in iter_leaves(chunk, (), step=add_step)}
            for stored, value in values.items():
                name = _key_of(stored, values)
                if (match := _LAYER.fullmatch(name)) is not None:
                    numbers.setdefault(match[1], set()).add(match[2])
                    name = f"{match[1]}.{self.layers[match[1]] + int(match[2])}.{match[3]}"
                if isinstance(value, Tensor):
                    # With one tensor rank, a file has both halves as they are in the whole weight.
                    is_halved = self.tensor_ranks > 1 and _is_gated(stored, values)
                    self._add(self._untied(name), value.detach(), rank, file, halves=1 + is_halved)
                # None is an empty extra state. All tensor ranks have the same entries, listed once.
                elif value is not None and rank == 0:
                    self.left_out.append(f"{name} (not a tensor)")
        # `Counter.update` adds: the layers of the next stage come after these.
        self.layers.update({stack: len(of) for stack, of in numbers.items()})

    def _untied(self, name: str) -> str:
        """Return the embedding's name for its copy in the last stage, which is compared as any rank's."""
        if not self.is_tied or not name.endswith("output_layer.weight"):
            return name
        return next((key for key in self.arrays if key.endswith("word_embeddings.weight")), name)

    def _add(self, name: str, data: Tensor, rank: int, file: str, *, halves: int) -> None:
        cut = _cut_dim(name, file)
        shape = [n * self.tensor_ranks if dim == cut else n for dim, n in enumerate(data.shape)]
        array = self.arrays.setdefault(name, CollectedArray(name, data.dtype, tuple(shape), file))
        array.check(data.dtype, tuple(shape), file)
        # A weight that is not cut is whole on every rank: these copies are compared, and one is kept.
        for half, part in enumerate(data.chunk(halves, cut) if cut is not None else (data,)):
            start = [0] * data.dim()
            if cut is not None:  # the gates of all ranks come first
                start[cut] = (half * self.tensor_ranks + rank) * part.shape[cut]
            array.add(SourcePart(part, tuple(start), tuple(part.shape)), file)

    def joined_layers(self) -> tuple[ForeignArray, ...]:
        """Return the weights, those of equal layers joined along a new first dim."""
        shapes: dict[str, dict[str, set[Any]]] = {}
        for name, array in self.arrays.items():
            if (match := _LAYER.fullmatch(name)) is not None:
                shapes.setdefault(match[1], {}).setdefault(match[2], set()).add((match[3], array.shape))
        equal = {stack for stack, of in shapes.items() if len(set(map(frozenset, of.values()))) == 1}
        arrays: dict[str, ForeignArray] = {}
        for name, array in self.arrays.items():
            match, whole = _LAYER.fullmatch(name), array.whole()
            if match is None or match[1] not in equal:
                arrays[name] = whole
                continue
            key, at = f"{match[1]}.{match[3]}", int(match[2])
            before = arrays[key].parts if key in arrays else ()
            parts = (SourcePart(part.data, (at, *part.start), (1, *part.shape)) for part in whole.parts)
            shape = (len(shapes[match[1]]), *whole.shape)
            arrays[key] = ForeignArray(key, whole.dtype, shape, (*before, *parts))
        return tuple(arrays.values())


def _key_of(name: str, names: Collection[str]) -> str:
    for norm, module in _NORMS:
        layer, separator, kind = name.rpartition(f".{norm}.")
        if separator and f"{layer}.{module}.weight" in names:
            return f"{layer}.{module}.layer_norm_{kind}"
    return name


def _is_gated(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a weight has gates before what they open: it has twice the rows that go on from it."""
    before, _, module = name.rpartition(".")[0].rpartition(".")
    if module not in _NEXT:
        return False
    first, second = (values.get(f"{before}.{of}.weight") for of in (module, _NEXT[module]))
    if first is None or second is None:
        raise _unsupported(name, "the other weight of its MLP is missing")
    return bool(first.shape[0] == 2 * second.shape[1])


def _cut_dim(name: str, file: str) -> int | None:
    """Return the dim along which tensor parallelism cuts a weight; None if each rank has it as a whole."""
    module, kind = name.split(".")[-2:] if "." in name else ("", name)
    is_norm = kind.startswith("layer_norm_") or module.endswith("norm")  # fused into a module, or one itself
    # A guess could join a weight along the wrong dim without an error, so unknown names are errors.
    if not (is_norm or module in _COLUMN | _ROW | _WHOLE) or ".experts." in name:
        raise _unsupported(file, f"{name!r} is a weight that ranks divide in an unknown way")
    if is_norm or module in _WHOLE:
        return None
    return 0 if module in _COLUMN else 1 if kind == "weight" else None


def _unsupported(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {why}. Load it with Megatron-LM at the layout that saved it, and save it with "
        f"--ckpt-format torch_dist."
    )
