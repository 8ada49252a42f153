"""The plan of a Hugging Face folder: the file and the position of each tensor. Pure.

Source: `split_torch_state_dict_into_shards` of huggingface_hub (files of a limited size in the order of the
model), `save_file` of safetensors (order in a file), transformers 5.23 (names, index).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from megackpt.formats.huggingface.names import INDEX, MODEL
from megackpt.formats.safetensors_encoding import DTYPE_CODES, encode_header
from megackpt.plans.metadata import DTYPES
from megackpt.storage import digest_of

_ALIGNMENT = 8  # of the data in a file, as safetensors has it
_LAYER = re.compile(r"(?:.*\.)?layers\.(?:(\d+)\.)?.*")


class PlannedTensor(NamedTuple):
    """A tensor that is written.

    Attributes:
        name: its name in the folder.
        dtype: its dtype, by its torch name.
        shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class PlannedFile:
    """A file of the folder.

    Attributes:
        name: its name.
        tensors: its tensors, in the order of their bytes.
    """

    name: str
    tensors: tuple[PlannedTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the data."""
        entries = [(t.name, DTYPE_CODES[t.dtype], t.shape, t.nbytes) for t in self.tensors]
        return encode_header(entries, metadata={"format": "pt"}, alignment=_ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


def plan_files(tensors: Sequence[PlannedTensor], *, max_file_bytes: int) -> tuple[PlannedFile, ...]:
    """Divide tensors among files of at most max_file_bytes of data, in order.

    A longer tensor has a file of its own. Tensors that fit into one file get `model.safetensors`.
    """
    groups: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + tensor.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    count = len(groups)
    # Wider elements come first, which aligns every tensor.
    return tuple(
        PlannedFile(
            MODEL if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors",
            tuple(sorted(group, key=lambda tensor: (-tensor.itemsize, tensor.name))),
        )
        for number, group in enumerate(groups, 1)
    )


def index_text(files: Sequence[PlannedFile]) -> str:
    """Return the content of the index of several files."""
    tensors = [tensor for file in files for tensor in file.tensors]
    document = {
        "metadata": {
            "total_parameters": sum(tensor.numel for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def plan_digest(files: Sequence[PlannedFile], source: Mapping[str, Any]) -> str:
    """Return a digest of files and of what fills them; equal if an interrupted export can be continued.

    source describes the checkpoint and the map, in plain JSON.
    """
    document = [source, [[file.name, digest_of(file.header)] for file in files], INDEX]
    return digest_of(json.dumps(document, sort_keys=True).encode())


def position_in_model(key: str, first: int) -> tuple[int, int]:
    """Return where part of an array of a checkpoint stands in a model: embeddings, layers, norm, output.

    Args:
        key: of the array, which has one layer, or all of them along its first axis.
        first: where the part begins along that axis.

    >>> position_in_model("decoder.layers.mlp.linear_fc2.weight", 10)
    (1, 10)
    """
    match = _LAYER.fullmatch(key)
    if match is not None:
        return 1, int(match[1]) if match[1] else first
    if "embedding" in key:
        return 0, 0
    return (3, 0) if "output_layer" in key else (2, 0)


def ranges_to_read(tensor: PlannedTensor, buffer_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of bytes of a tensor, of at most buffer_bytes; whole rows, if rows are short enough.

    Each begins at a multiple of 16 bytes, where a read of a part may begin.
    """
    step = max(buffer_bytes // 16, 1) * 16
    row = math.lcm(math.prod(tensor.shape[1:]) * tensor.itemsize, 16)
    if 0 < row <= step:
        step = step // row * row
    for start in range(0, tensor.nbytes, step):
        yield start, min(start + step, tensor.nbytes)
