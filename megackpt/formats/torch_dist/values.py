"""Values that are no tensors, once more as stock DCP stores them: each under its own name.

Owns these copies. Common state lies in common.pt, and objects in lists under `KEY/shard_OFFSET_SHAPE`, as
Megatron-Core stores both; `dcp.load` looks for neither. A load of ours takes nothing from here.
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
from megackpt.metadata import OBJECT, StoredChunks
from megackpt.storage import Store

log = logging.getLogger(__name__)

MOST_VALUES = 10_000
"""Each value is an item, which takes about 0.1 ms and 1 KB. State of more leaves is in common.pt only."""

MOST_OBJECT_BYTES = 64 << 20
"""An object is read again to be copied. Larger ones are not."""

_LENGTH_BYTES = 8  # of the table's length, at the end of a file


@dataclass(frozen=True, slots=True)
class Value:
    """Where a value lies.

    Attributes:
        key: its path in the state dict, joined with dots, as DCP flattens one.
        path: the steps of that path; None where they are not known.
        file: the file that holds it.
        offset_bytes: where it begins there.
        length: of the item, in bytes.
    """

    key: str
    path: tuple[Any, ...] | None
    file: str
    offset_bytes: int
    length: int


def write_state(store: Store, *, attempt: str, state: Mapping[str, Any]) -> Json:
    """Write the leaves of common state; return what is to be known of the file, nothing if there is none.

    Source: torch.distributed.checkpoint `flatten_state_dict`, for what is a leaf and how it is named.
    """
    leaves: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def visit(path: tuple[Any, ...], value: Any) -> None:
        leaves.setdefault(".".join(map(str, path)), (path, value))

    traverse_state_dict(dict(state), visit)
    if len(leaves) > MOST_VALUES:
        log.info(
            "common state has %d values, of which dcp.load sees none: more than %d are not copied",
            len(leaves),
            MOST_VALUES,
        )
        leaves.clear()
    # That each may be stored was checked with all of common state.
    items = [(key, _as_json(path), save_known_value(value)) for key, (path, value) in leaves.items()]
    return _write(store, names.values_file(attempt, "state"), items, entry="values")


def write_objects(store: Store, *, attempt: str, stored: StoredChunks, lengths: Iterable[int]) -> Json:
    """Write objects of shape (1,) that a save has stored in lists; lengths are those of all items, in bytes.

    Such an object is what became of a value that DCP had saved.
    """
    items: list[tuple[str, tuple[Any, ...] | None, bytes]] = []
    for row, length in enumerate(lengths):
        spec = stored.table.arrays[int(stored.table.array[row])]
        if spec.dtype != OBJECT or spec.global_shape != (1,) or length > MOST_OBJECT_BYTES:
            continue
        data, name = bytearray(length), stored.files[int(stored.file[row])]
        store.read_into(name, int(stored.offset_bytes[row]), memoryview(data))
        with contextlib.suppress(FormatError, UnserializableError):  # it is in its list all the same
            (value,) = load_value(bytes(data), where=f"{store.location}: object {spec.key!r}")
            items.append((spec.key, None, save_value(value, path=spec.key)))
    return _write(store, names.values_file(attempt, "objects"), items, entry="value_objects")


def written_values(store: Store, *, attempt: str) -> list[Value]:
    """Return what this attempt has written, common state first."""
    found: list[Value] = []
    for kind in ("state", "objects"):
        name = names.values_file(attempt, kind)
        if not store.exists(name):
            continue
        data = store.read(name, max_bytes=store.size(name))
        length = int.from_bytes(data[-_LENGTH_BYTES:], "little")
        table = json.loads(data[-_LENGTH_BYTES - length : -_LENGTH_BYTES])
        found += [Value(k, None if p is None else tuple(p), name, at, n) for k, p, at, n in table]
    return found


def _as_json(path: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a path if JSON can hold it; None if a key in it is anything but text or a number."""
    return path if all(type(step) in (str, int) for step in path) else None


def _write(store: Store, name: str, items: list[tuple[str, Any, bytes]], *, entry: str) -> Json:
    """Write items, and behind them a table of their places, which DCP does not look at."""
    if not items:
        return {}
    table, position = [], 0
    for key, path, data in items:
        table.append([key, path, position, len(data)])
        position += len(data)
    text = json.dumps(table).encode()
    content = [data for _, _, data in items]
    return {
        entry: write_small_file(
            store, name, b"".join([*content, text, len(text).to_bytes(_LENGTH_BYTES, "little")])
        )
    }
