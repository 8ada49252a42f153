"""Read a megackpt checkpoint with only the standard library and numpy.

It shows that docs/format.md is enough to write a reader, without torch and other files of megackpt.

    python -m megackpt.read_checkpoint CHECKPOINT [KEY]     lists arrays and common state, or prints an array

    Checkpoint("ckpt/iter_0000100").array("decoder.weight", np.s_[:10, 5])     reads a slice

bfloat16 is decoded as float32. Digests (xxh3-64 per 256 KiB block, see docs/format.md) are not checked.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
NUMPY |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}
# Dtypes that numpy lacks are read as unsigned integers with the same bits; only bfloat16 is decoded.
RAW_BITS = {"bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
RAW_BITS |= {"float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1"}


def read_safetensors(data: bytes) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the tensors of a safetensors file, and its metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(data[start:stop], NUMPY.get(entry["dtype"], "u1")).reshape(-1)
        if entry["dtype"] in NUMPY:
            tensors[name] = tensors[name].reshape(entry["shape"])
    return tensors, metadata


def strings(columns: dict[str, Array], name: str) -> list[str]:
    """Return a list of strings. It is stored as two columns: UTF-8 text, and the end of each string."""
    ends = columns[f"{name}.ends"].tolist()
    text = columns[f"{name}.utf8"].tobytes()
    return [text[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def bounds(index: Any, shape: tuple[int, ...]) -> tuple[list[int], list[int], tuple[Any, ...]]:
    """Return start and end of a slice along each dim, and an index that drops dims with an integer."""
    parts = index if isinstance(index, tuple) else (index,)
    at = parts.index(...) if ... in parts else len(parts)
    rest = [slice(None)] * (len(shape) - len(parts) + (... in parts))
    taken = [range(n)[part] for n, part in zip(shape, (*parts[:at], *rest, *parts[at + 1 :]), strict=True)]
    if any(isinstance(r, range) and r.step != 1 for r in taken):
        raise IndexError(f"{index!r}: the steps of slices must be 1. Apply other steps to the result.")
    whole = [r if isinstance(r, range) else range(r, r + 1) for r in taken]
    drop = tuple(slice(None) if isinstance(r, range) else 0 for r in taken)
    return [r.start for r in whole], [r.start + len(r) for r in whole], drop


class Checkpoint:
    """An opened checkpoint: `keys()`, `array(key)`, `objects(key)`, `common`."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        manifest = json.loads((self.directory / "metadata.json").read_text())
        stored_format = (manifest["sharded_backend"], manifest["sharded_backend_version"])
        if stored_format != ("megackpt", 1):
            raise SystemExit(f"{directory} has format {stored_format}; this program reads ('megackpt', 1).")
        self.common = json.loads((self.directory / manifest["common"]["file"]).read_text())
        self.common_tensors: dict[str, Array] = {}
        if "common_tensors" in manifest:
            blob = (self.directory / manifest["common_tensors"]["file"]).read_bytes()
            self.common_tensors = read_safetensors(blob)[0]
        index, _ = read_safetensors((self.directory / manifest["index"]["file"]).read_bytes())
        self.index = {name: c.astype("i8") if c.dtype == "u4" else c for name, c in index.items()}
        shapes = zip(self.index["global_shape"].tolist(), self.index["ndim"].tolist(), strict=True)
        self.shapes = [tuple(shape[:ndim]) for shape, ndim in shapes]
        self.dtypes = strings(self.index, "dtype")
        self.files = strings(self.index, "file_name")
        self.number = {key: i for i, key in enumerate(strings(self.index, "key"))}

    def keys(self) -> list[str]:
        """Return the keys of all arrays and arrays of objects."""
        return list(self.number)

    def array(self, key: str, index: Any = ..., *, raw: bool = False) -> Array:
        """Return a global array, or a slice of it, assembled from its chunks.

        raw returns bfloat16 as unsigned integers with the same bits.
        """
        number = self.number[key]
        shape, name = self.shapes[number], self.dtypes[number]
        low, high, drop = bounds(index, shape)
        values = np.zeros([b - a for a, b in zip(low, high, strict=True)], np.dtype(RAW_BITS.get(name, name)))
        for row in np.flatnonzero(self.index["array"] == number):
            start = self.index["start"][row, : len(shape)]
            box = self.index["shape"][row, : len(shape)]
            begin, end = np.maximum(start, low), np.minimum(start + box, high)
            if (begin >= end).any():
                continue
            first, last = int(self.index["flat_start"][row]), int(self.index["flat_stop"][row])
            data = np.frombuffer(self._bytes(row), values.dtype)
            if (first, last) == (0, int(box.prod())):
                source = tuple(slice(a, b) for a, b in zip(begin - start, end - start, strict=True))
                target = tuple(slice(a, b) for a, b in zip(begin - low, end - low, strict=True))
                values[target] = data.reshape(box)[source]
            else:  # a flat range of the box: row-major positions from first to last
                # Column i has the coordinates of element i of the range in the slice; some lie outside of it.
                inside = np.stack(np.unravel_index(np.arange(first, last), box)) + (start - low)[:, None]
                is_asked = ((inside >= 0) & (inside < np.subtract(high, low)[:, None])).all(axis=0)
                values[tuple(inside[:, is_asked])] = data[is_asked]
        if name == "bfloat16" and not raw:
            values = np.asarray(np.left_shift(values.astype("u4"), 16)).view("f4")
        return np.asarray(values[drop])

    def objects(self, key: str) -> dict[tuple[int, ...], tuple[Any, dict[str, Array]]]:
        """Return an array of objects as {position: (JSON tree, tensors that the tree refers to)}."""
        number = self.number[key]
        objects: dict[tuple[int, ...], tuple[Any, dict[str, Array]]] = {}
        for row in np.flatnonzero(self.index["array"] == number):
            tensors, metadata = read_safetensors(self._bytes(row))
            position = tuple(self.index["start"][row, : len(self.shapes[number])].tolist())
            objects[position] = (json.loads(metadata["tree"]), tensors)
        return objects

    def _bytes(self, row: Any) -> bytes:
        with open(self.directory / self.files[int(self.index["file"][row])], "rb") as file:
            file.seek(int(self.index["offset_bytes"][row]))
            return file.read(int(self.index["nbytes"][row]))


def main(arguments: list[str]) -> None:
    """List a checkpoint, or print one array of it."""
    if not arguments:
        raise SystemExit(__doc__)
    checkpoint = Checkpoint(arguments[0])
    if len(arguments) > 1:
        print(checkpoint.array(arguments[1]))
        return
    for key, number in checkpoint.number.items():
        print(f"{checkpoint.dtypes[number]:>14}  {list(checkpoint.shapes[number])!s:24} {key}")
    print(json.dumps(checkpoint.common, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
