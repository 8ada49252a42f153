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
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megackpt.entities.tree import add_step, dotted, iter_leaves
from megackpt.errors import FormatError, NotACheckpointError, UnsupportedError
from megackpt.formats.file_names import LEGACY_MEGATRON
from megackpt.formats.foreign.mapped_files import load_mapped_file
from megackpt.formats.foreign.state import CollectedParts, ForeignArray, ForeignState, SourcePart, plain_part
from megackpt.formats.foreign.strategy import ForeignLoadStrategy, folder_of_latest, layout_faults
from megackpt.formats.strategy import Format

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
_FILE = "model_optim_rng.pt"
_CHUNK = re.compile(r"model\d*")  # several under an interleaved schedule
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
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


class _Shard(NamedTuple):
    """What one file has of a weight."""

    tensor_rank: int
    file: str
    data: Tensor


class LegacyMegatronLoadStrategy(ForeignLoadStrategy):
    """Reads the weights and arguments of one iteration, or of the newest in a folder of several."""

    backend = "megatron"
    file_names = LEGACY_MEGATRON

    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return the weights of all files as whole arrays, and the other values of the first file."""
        with layout_faults(path, "Megatron-LM"):
            folder = folder_of_latest(path, "latest_checkpointed_iteration.txt", _folder_of_iteration)
            files = _files(folder)
            loaded = {at: load_mapped_file(file, checks_bytes=checks_bytes) for at, file in files.items()}
            for at, value in loaded.items():
                if not isinstance(value, dict) or not any(map(_CHUNK.fullmatch, map(str, value))):
                    raise FormatError(
                        f"{files[at]}: it has no 'model'. Megatron-LM did not write it.", path=files[at]
                    )
            args = next(iter(loaded.values())).get("args")
            _check_ranks(folder, files, args)
            first = loaded[0, 0]
            left_out = [f"{name} (it is of each rank)" for name in _OF_A_RANK if first.get(name) is not None]
            arrays = _arrays(
                _shards(files, loaded, left_out), args, tensor_ranks=max(t for t, _ in files) + 1
            )
            rest = {
                k: v
                for k, v in first.items()
                if k not in ("args", *_OF_A_RANK) and not _CHUNK.fullmatch(str(k))
            }
            common = plain_part(rest, "", left_out)
            if isinstance(args, argparse.Namespace):
                common["args"] = argparse.Namespace(**plain_part(vars(args), "args", left_out))
            origin = f"Megatron-LM with --ckpt-format torch, {len(files)} ranks of TP and PP"
            return ForeignState(
                arrays=arrays, common=common, origin={"imported_from": origin}, left_out=tuple(left_out)
            )


FORMAT = Format(backend="megatron", version=1, load=LegacyMegatronLoadStrategy)


def _folder_of_iteration(text: str) -> str:
    return f"iter_{int(text):07d}" if text.isdecimal() else text


def _files(folder: str) -> dict[tuple[int, int], str]:
    """Return the files by tensor rank and stage."""
    files: dict[tuple[int, int], str] = {}
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


def _check_ranks(folder: str, files: Mapping[tuple[int, int], str], args: Any) -> None:
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


def _shards(
    files: Mapping[tuple[int, int], str], loaded: Mapping[tuple[int, int], Any], left_out: list[str]
) -> dict[str, list[_Shard]]:
    """Return what the files have of each weight, layers by their numbers in the whole model."""
    shards: dict[str, list[_Shard]] = {}
    before = Counter[str]()  # layers of each stack in earlier stages and chunks
    chunks = {name for value in loaded.values() for name in value if _CHUNK.fullmatch(str(name))}
    for chunk in sorted(chunks, key=lambda name: int(name[len("model") :] or 0)):
        for stage in sorted({stage for _, stage in files}):  # all stages have their first chunks first
            numbers: dict[str, set[str]] = {}
            for rank in sorted(rank for rank, of in files if of == stage):
                leaves = iter_leaves(loaded[rank, stage].get(chunk, {}), (), step=add_step)
                values = {dotted(steps): value for steps, value in leaves}
                for stored, data in values.items():
                    name = _key_of(stored, values)
                    if (match := _LAYER.fullmatch(name)) is not None:
                        numbers.setdefault(match[1], set()).add(match[2])
                        name = f"{match[1]}.{before[match[1]] + int(match[2])}.{match[3]}"
                    if isinstance(data, Tensor):
                        shards.setdefault(name, []).append(_Shard(rank, files[rank, stage], data.detach()))
                    # None is an empty extra state. All tensor ranks have the same entries, listed once.
                    elif data is not None and rank == 0:
                        left_out.append(f"{name} (not a tensor)")
            # `Counter.update` adds: the layers of the next stage come after these.
            before.update({stack: len(of) for stack, of in numbers.items()})
    return shards


def _key_of(name: str, names: Container[str]) -> str:
    for norm, module in _NORMS:
        layer, separator, kind = name.rpartition(f".{norm}.")
        if separator and f"{layer}.{module}.weight" in names:
            return f"{layer}.{module}.layer_norm_{kind}"
    return name


def _arrays(shards: dict[str, list[_Shard]], args: Any, *, tensor_ranks: int) -> tuple[ForeignArray, ...]:
    """Join weights along the dims that tensor parallelism cuts, and equal layers along a new first one."""
    if getattr(args, "untie_embeddings_and_output_weights", None) is False:
        # The last stage has a copy of the embedding. It is compared like that of any other rank.
        for name in [name for name in shards if name.endswith("output_layer.weight")]:
            embedding = next((key for key in shards if key.endswith("word_embeddings.weight")), name)
            shards[embedding] = shards[embedding] + (shards.pop(name) if embedding != name else [])
    stacks = _equal_layers(shards)
    joined: dict[str, tuple[tuple[int, ...], CollectedParts]] = {}
    dtypes = {}
    for name, of_ranks in shards.items():
        match = _LAYER.fullmatch(name)
        layers = stacks.get(match[1]) if match else None
        key = f"{match[1]}.{match[3]}" if match and layers else name
        axis, at = ((layers,), (int(match[2]),)) if match and layers else ((), ())
        # With one tensor rank, a file has both halves as they are in the whole weight.
        shape, parts = _joined(
            name, of_ranks, tensor_ranks, halves=2 if tensor_ranks > 1 and _is_gated(name, shards) else 1
        )
        dtypes[key] = of_ranks[0].data.dtype
        collected = joined.setdefault(key, ((*axis, *shape), CollectedParts(key)))[1]
        for file, start, data in parts:
            collected.add(SourcePart(data, (*at, *start), ((1,) * len(at)) + tuple(data.shape)), file)
    return tuple(
        ForeignArray(key, dtypes[key], shape, parts.once()) for key, (shape, parts) in joined.items()
    )


def _is_gated(name: str, shards: Mapping[str, Sequence[_Shard]]) -> bool:
    """Return whether a weight has gates before what they open: it has twice the rows that go on from it."""
    before, _, module = name.rpartition(".")[0].rpartition(".")
    if module not in _NEXT:
        return False
    first, second = (shards.get(f"{before}.{of}.weight") for of in (module, _NEXT[module]))
    if not first or not second:
        raise _unsupported(name, "the other weight of its MLP is missing")
    return first[0].data.shape[0] == 2 * second[0].data.shape[1]


def _joined(
    name: str, shards: Sequence[_Shard], tensor_ranks: int, *, halves: int
) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...], Tensor]]]:
    """Return the shape of a whole weight, and file, start and elements of each part of it."""
    module, kind = name.split(".")[-2:] if "." in name else ("", name)
    is_fused_norm = kind.startswith("layer_norm_")
    # A guess could join a weight along the wrong dim without an error, so unknown names are errors.
    is_known = is_fused_norm or module.endswith("norm") or module in _COLUMN | _ROW | _WHOLE
    if not is_known or ".experts." in name:
        raise _unsupported(shards[0].file, f"{name!r} is a weight that ranks divide in an unknown way")
    cut = 0 if module in _COLUMN and not is_fused_norm else 1 if module in _ROW and kind == "weight" else None
    shape = list(shards[0].data.shape)
    if any(
        (shard.data.shape, shard.data.dtype) != (shards[0].data.shape, shards[0].data.dtype)
        for shard in shards
    ):
        raise FormatError(f"{shards[0].file}: {name!r} has another shape or dtype on other ranks.", key=name)
    # Every rank has the whole weight. `CollectedParts` compares these copies and keeps one.
    if cut is None:
        return tuple(shape), [(file, (0,) * len(shape), data) for _, file, data in shards]
    extent, parts = shape[cut] // halves, []
    for rank, file, data in shards:
        for half in range(halves):  # the gates of all ranks come first
            start = [(half * tensor_ranks + rank) * extent if dim == cut else 0 for dim in range(len(shape))]
            parts.append((file, tuple(start), data.narrow(cut, half * extent, extent)))
    shape[cut] *= tensor_ranks
    return tuple(shape), parts


def _equal_layers(shards: Mapping[str, Sequence[_Shard]]) -> dict[str, int]:
    """Return the number of layers of each stack whose layers all have the same weights in the same shapes."""
    stacks: dict[str, dict[str, set[Any]]] = {}
    for name, of_ranks in shards.items():
        if (match := _LAYER.fullmatch(name)) is not None:
            of_layer = stacks.setdefault(match[1], {}).setdefault(match[2], set())
            of_layer.add((match[3], tuple(of_ranks[0].data.shape)))
    return {stack: len(of) for stack, of in stacks.items() if len(set(map(frozenset, of.values()))) == 1}


def _unsupported(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: {why}. Load it with Megatron-LM at the layout that saved it, and save it with "
        f"--ckpt-format torch_dist."
    )
