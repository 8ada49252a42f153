"""A real checkpoint as the source of a simulated load.

Its index is read, and the model is guessed from it: which arrays belong to one parameter, which have an
axis of layers, which dim tp cuts. Guesses use names and how chunks are cut. The order of parameters in the
buffers of the optimizer is not stored, so the order of keys is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megackpt.cli.simulation.arrays import STEP, Model, Stack, Weight, state_key
from megackpt.cli.simulation.outcome import SaveOutcome
from megackpt.cli.simulation.saves_and_loads import StoredCheckpoint, table_nbytes
from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable
from megackpt.storage import open_store

_FUSED = (("q", "k", "v"), ("gate", "up"))
_STATE = re.compile(r"optimizer\.state\.(?P<state>\w+)\.(?P<key>.+)")
_LAYER = re.compile(r"[._]layers\.(?P<index>\d+\.)?")
_EXPERTS = re.compile(r"\.experts\.(?!\d)")
_VOCABULARY = re.compile(r"(word_embeddings|output_layer|embed_tokens|lm_head)\.weight$")
_ROWS = re.compile(r"(qkv|query_key_value|[qkv]_proj|fc1|(gate|up|gate_up)_proj|h_to_4h)\.(weight|bias)$")
_COLUMNS = re.compile(
    r"(linear_proj|o_proj|out_proj|fc2|(?<!q_)(?<!kv_)down_proj|4h_to_h|attention\.dense)\.weight$"
)
_NEVER_CUT = re.compile(r"norm|bias|router|down_proj|position")  # what is not named above


def open_stored(path: Path) -> tuple[SaveOutcome, StoredCheckpoint, Model, tuple[str, ...]]:
    """Return what a checkpoint of any format holds, its model, and the states that an optimizer has stored.

    Raises:
        NotACheckpointError, FormatError, IntegrityError: it is not one, or is damaged.
    """
    store = open_store(path)
    contents = open_checkpoint(store)
    chunks = contents.chunks(sorted(contents.arrays))
    # Where chunks lie in no common files, each is one.
    raw = chunks.raw_ranges()
    file = raw.file if raw is not None else np.arange(len(chunks.table), dtype=np.int64)
    stored = StoredCheckpoint(chunks.table, file, chunks.block_bytes, store.location)
    model, states = model_of(chunks.table)
    return _outcome(stored, read_manifest(store).get("index")), stored, model, states


def _outcome(stored: StoredCheckpoint, index: object) -> SaveOutcome:
    """Return the sizes of a checkpoint; index is the entry of its manifest, if the format has one."""
    table, file = stored.table, stored.file
    files = int(file.max(initial=-1)) + 1
    nbytes = np.zeros(files, np.int64)
    np.add.at(nbytes, file, table.nbytes)
    return SaveOutcome(
        layout=None,
        nbytes=nbytes,
        chunks=np.bincount(file, minlength=files).astype(np.int64),
        arrays=len(table.arrays),
        index_nbytes=int(index["nbytes"]) if isinstance(index, dict) and "nbytes" in index else 0,
        rank_s=np.zeros(0),
        describe_s=np.zeros(0),
        plan_nbytes=table_nbytes(table),
    )


def model_of(table: ChunkTable) -> tuple[Model, tuple[str, ...]]:
    """Return the parameters that arrays belong to, and the states kept for each of their elements. Pure.

    Objects, and arrays without a dim of their own, are left out.
    """
    arrays = {spec.key: spec for spec in table.arrays if spec.dtype != OBJECT}
    matches = [match for key in arrays if (match := _STATE.fullmatch(key))]
    plain = {key: spec for key, spec in arrays.items() if not _STATE.fullmatch(key)}
    states = {match["state"] for match in matches if match["key"] in plain} - {STEP}
    cut = _cut_dims(table)
    weights = [(key, *_weight(key, names, arrays, cut)) for key, names in sorted(_parameters(plain).items())]
    model = _assembled([(key, weight, layers) for key, weight, layers in weights if weight is not None])
    return model, tuple(sorted(states))


def _assembled(weights: Sequence[tuple[str, Weight, int]]) -> Model:
    """Put parameters where their keys have them; each comes with the extent of its axis of layers."""
    first: list[Weight] = []
    last: list[Weight] = []
    stacked: dict[int, list[Weight]] = {}
    single: dict[int, list[Weight]] = {}
    for key, weight, layers in weights:
        layer = _LAYER.search(key)
        if layers:
            stacked.setdefault(layers, []).append(weight)
        elif layer is not None and layer["index"]:
            single.setdefault(int(layer["index"].rstrip(".")), []).append(weight)
        else:
            (first if "embed" in key else last).append(weight)
    stacks = [Stack(layers=n, weights=tuple(equal)) for n, equal in sorted(stacked.items())]
    stacks += [Stack(layers=1, weights=tuple(own), has_axis=False) for _, own in sorted(single.items())]
    return Model(first=tuple(first), stacks=tuple(stacks), last=tuple(last))


def _parameters(plain: Mapping[str, ArraySpec]) -> dict[str, tuple[str, ...]]:
    """Return the keys of parameters with the names of their parts; one of the empty name if not fused."""
    parts_of_key: dict[str, tuple[str, ...]] = {}
    for key in plain:
        base, _, name = key.rpartition(".")
        fused = next((f for f in _FUSED if name in f and all(f"{base}.{part}" in plain for part in f)), None)
        if fused is None:
            parts_of_key[key] = ("",)
        else:
            parts_of_key[base] = fused
    return parts_of_key


def _weight(
    key: str, names: tuple[str, ...], arrays: Mapping[str, ArraySpec], cut: Mapping[str, set[int]]
) -> tuple[Weight | None, int]:
    """Return a parameter and the extent of its axis of layers, 0 if it has none."""
    keys = [f"{key}.{name}" if name else key for name in names]
    shapes = [arrays[k].global_shape for k in keys]
    leading = _leading_axes(key, shapes[0], arrays)
    if len(shapes[0]) <= leading:
        return None, 0
    is_expert = _is_stack_of_experts(key, shapes[0], arrays)
    has_layers = leading - is_expert > 0
    has_state = any(_STATE.fullmatch(name) for name in arrays)
    tp_dim = _tp_dim(key, len(shapes[0]) - leading, {d - leading for k in keys for d in cut[k]})
    weight = Weight(
        key=key,
        parts=tuple((name, shape[leading]) for name, shape in zip(names, shapes, strict=True)),
        inner=shapes[0][leading + 1 :],
        tp_dim=tp_dim,
        experts=shapes[0][leading - 1] if is_expert else 0,
        is_vocabulary=_VOCABULARY.search(key) is not None,
        dtype=arrays[keys[0]].dtype,
        is_trained=not has_state or state_key(STEP, key) in arrays,
    )
    return weight, shapes[0][0] if has_layers else 0


def _leading_axes(key: str, shape: tuple[int, ...], arrays: Mapping[str, ArraySpec]) -> int:
    """Return how many axes over layers and experts precede a parameter's own."""
    return _layer_axes(key, arrays) + _is_stack_of_experts(key, shape, arrays)


def _layer_axes(key: str, arrays: Mapping[str, ArraySpec]) -> int:
    """Return the number of axes over layers: as many as the count of updates has, where there is one."""
    counted = arrays.get(state_key(STEP, key))
    if counted is not None:
        return len(counted.global_shape)
    layer = _LAYER.search(key)
    return int(layer is not None and not layer["index"])


def _is_stack_of_experts(key: str, shape: tuple[int, ...], arrays: Mapping[str, ArraySpec]) -> bool:
    own_dims = 1 if key.endswith("bias") else 2
    return _EXPERTS.search(key) is not None and len(shape) == _layer_axes(key, arrays) + 1 + own_dims


def _tp_dim(key: str, dims: int, cut: set[int]) -> int | None:
    if _VOCABULARY.search(key) or _ROWS.search(key):
        return 0
    if _COLUMNS.search(key):
        return 1 if dims > 1 else None
    own = sorted(d for d in cut if d in (0, 1))
    return own[0] if len(own) == 1 and not _NEVER_CUT.search(key) else None


def _cut_dims(table: ChunkTable) -> dict[str, set[int]]:
    """Return the dims along which the chunks of each array are cut."""
    whole = table.padded_global_shape()[table.array]
    is_cut = np.zeros((len(table.arrays), table.dims), np.bool_)
    np.logical_or.at(is_cut, table.array, table.shape < whole)
    array, dim = np.nonzero(is_cut)
    dims_of_key: dict[str, set[int]] = {spec.key: set() for spec in table.arrays}
    for i, d in zip(array.tolist(), dim.tolist(), strict=True):
        dims_of_key[table.arrays[i].key].add(d)
    return dims_of_key
