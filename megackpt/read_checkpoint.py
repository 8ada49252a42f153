"""Read a megackpt checkpoint with nothing but the standard library and numpy.

The proof that docs/format.md is all there is.

python docs/read_checkpoint.py CHECKPOINT [KEY]      lists the arrays and the common state, or prints one
array

Not checked here: digests (they are xxh3-64 per 256 KiB block, see docs/format.md).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

NUMPY = {"F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"}
NUMPY |= {"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?"}
# Dtypes that numpy lacks come back as unsigned integers that hold their bits.
RAW_BITS = {"bfloat16": "u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}
RAW_BITS |= {"float8_e4m3fnuz": "u1", "float8_e5m2fnuz": "u1", "float8_e8m0fnu": "u1"}


def read_safetensors(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
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


def strings(columns: dict[str, np.ndarray], name: str) -> list[str]:
    """Return a list of strings, stored as UTF-8 and the end of each."""
    ends = columns[f"{name}.ends"].tolist()
    text = columns[f"{name}.utf8"].tobytes()
    return [text[a:b].decode() for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


class Checkpoint:
    """An opened checkpoint: `keys()`, `array(key)`, `objects(key)`, `common`."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        manifest = json.loads((self.directory / "metadata.json").read_text())
        found = (manifest["sharded_backend"], manifest["sharded_backend_version"])
        if found != ("megackpt", 1):
            raise SystemExit(f"{directory} has format {found}; this program reads ('megackpt', 1).")
        self.common = json.loads((self.directory / manifest["common"]["file"]).read_text())
        self.common_tensors = {}
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

    def array(self, key: str) -> np.ndarray:
        """Return a global array, put together from its chunks."""
        number = self.number[key]
        shape, name = self.shapes[number], self.dtypes[number]
        whole = np.zeros(shape, np.dtype(RAW_BITS.get(name, name)))
        for row in np.flatnonzero(self.index["array"] == number):
            start = self.index["start"][row, : len(shape)]
            box = self.index["shape"][row, : len(shape)]
            data = np.frombuffer(self._bytes(row), whole.dtype)
            first, last = int(self.index["flat_start"][row]), int(self.index["flat_stop"][row])
            if (first, last) == (0, int(box.prod())):
                whole[tuple(slice(a, a + n) for a, n in zip(start, box, strict=True))] = data.reshape(box)
            else:  # a flat range of the box: the row-major positions first..last
                inside = np.unravel_index(np.arange(first, last), box)
                whole[tuple(i + a for i, a in zip(inside, start, strict=True))] = data
        return whole

    def objects(self, key: str) -> dict[tuple[int, ...], tuple[object, dict[str, np.ndarray]]]:
        """Return an array of objects as {position: (JSON tree, tensors that the tree refers to)}."""
        number, found = self.number[key], {}
        for row in np.flatnonzero(self.index["array"] == number):
            tensors, metadata = read_safetensors(self._bytes(row))
            position = tuple(self.index["start"][row, : len(self.shapes[number])].tolist())
            found[position] = (json.loads(metadata["tree"]), tensors)
        return found

    def _bytes(self, row: int) -> bytes:
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
    for key in checkpoint.number:
        number = checkpoint.number[key]
        print(f"{checkpoint.dtypes[number]:>14}  {list(checkpoint.shapes[number])!s:24} {key}")
    print(json.dumps(checkpoint.common, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
