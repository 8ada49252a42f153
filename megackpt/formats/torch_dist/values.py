"""Copies of values that are not tensors, as stock DCP stores them: each under its own name.

Common state is in common.pt, and objects are in lists under `KEY/shard_OFFSET_SHAPE`, as Megatron-Core stores
both; `dcp.load` looks for neither. A load by megackpt does not read these copies.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint._traverse import traverse_state_dict

from megackpt.errors import FormatError, UnserializableError
from megackpt.formats.documents import write_small_file
from megackpt.formats.safe_pickle import load_value, save_known_value, save_value
from megackpt.formats.strategy import Json
from megackpt.formats.torch_dist import names
from megackpt.plans.metadata import OBJECT, StoredChunks
from megackpt.storage import Store

log = logging.getLogger(__name__)

MAX_VALUES = 10_000
"""Common state with more leaves is not copied: each is an item, which takes about 0.1 ms and 1 KB."""

MAX_OBJECT_BYTES = 64 << 20
"""Larger objects are not copied: each is read again for its copy."""

_LENGTH_BYTES = 8  # of the table's length, at the end of a file


@dataclass(frozen=True, slots=True)
class Value:
    """Where a value lies.

    Attributes:
        key: its path in the state dict, joined with dots, as DCP flattens one.
        path: the steps of that path; None where they are not known.
        file: the file that contains it.
        offset_bytes: where it begins in the file.
        length: length of the item, in bytes.
    """

    key: str
    path: tuple[Any, ...] | None
    file: str
    offset_bytes: int
    length: int


def write_state(store: Store, *, attempt: str, state: Mapping[str, Any]) -> Json:
    """Write the leaves of common state; return the entry of the file, empty if there are no leaves.

    Source: torch.distributed.checkpoint `flatten_state_dict`, which defines leaves and their names.
    """
    leaves: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        # Two paths may join to one key. DCP can list it once, so the first one stays.
        leaves.setdefault(".".join(map(str, path)), (path, value))

    traverse_state_dict(dict(state), visit)
    if len(leaves) > MAX_VALUES:
        log.info(
            "common state has %d values, and dcp.load sees none of them: more than %d are not copied",
            len(leaves),
            MAX_VALUES,
        )
        leaves.clear()
    # `check_common` has checked all of common state.
    items = [(key, _as_json(path), save_known_value(value)) for key, (path, value) in leaves.items()]
    return _write(store, names.values_file(attempt, "state"), items, entry="values")


def write_objects(store: Store, *, attempt: str, stored: StoredChunks, lengths: Iterable[int]) -> Json:
    """Write copies of the objects of shape (1,); lengths are those of all items, in bytes.

    A value that DCP has saved becomes such an object when it is loaded and saved again.
    """
    items: list[tuple[str, tuple[Any, ...] | None, bytes]] = []
    for row, length in enumerate(lengths):
        spec = stored.table.arrays[int(stored.table.array[row])]
        if spec.dtype != OBJECT or spec.global_shape != (1,) or length > MAX_OBJECT_BYTES:
            continue
        data, name = bytearray(length), stored.files[int(stored.file[row])]
        store.read_into(name, int(stored.offset_bytes[row]), memoryview(data))
        # Without a copy, the object is still stored in its list.
        with contextlib.suppress(FormatError, UnserializableError):
            (value,) = load_value(bytes(data), where=f"{store.location}: object {spec.key!r}")
            items.append((spec.key, None, save_value(value, path=spec.key)))
    return _write(store, names.values_file(attempt, "objects"), items, entry="value_objects")


def written_values(store: Store, *, attempt: str) -> list[Value]:
    """Return the copies of this attempt, those of common state first."""
    written: list[Value] = []
    for kind in ("state", "objects"):
        name = names.values_file(attempt, kind)
        if not store.exists(name):
            continue
        data = store.read(name, max_bytes=store.size(name))
        length = int.from_bytes(data[-_LENGTH_BYTES:], "little")
        table = json.loads(data[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
        written += [Value(k, None if p is None else tuple(p), name, at, n) for k, p, at, n in table]
    return written


def _as_json(path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a path if JSON can hold it; None if it has a key that is neither text nor a number."""
    return path if all(type(step) in (str, int) for step in path) else None


def _write(store: Store, name: str, items: list[tuple[str, Any, bytes]], *, entry: str) -> Json:
    """Write items, and behind them a table of their offsets, which DCP does not read."""
    if not items:
        return {}
    table, position = [], 0
    for key, path, data in items:
        table.append([key, path, position, len(data)])
        position += len(data)
    # After the items, and its length last: so the table is found from the end of the file.
    text = json.dumps(table).encode()
    content = [data for _, _, data in items]
    return {
        entry: write_small_file(
            store, name, b"".join([*content, text, len(text).to_bytes(_LENGTH_BYTES, "little")])
        )
    }
