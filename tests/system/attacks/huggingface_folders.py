"""Attacks on Hugging Face folders: the index, and the headers of its files."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from typing import Any

from tests.system.attacks.crafting import HUGGINGFACE, Location, attack, attacks_with, edit_json, safetensors
from tests.system.attacks.documents import DEEP, NAMES, SIZES

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DTYPES = {
    "unknown": "F9",
    "packed": "F4",
    "wider": "F64",
    "object": "O",
    "number": 4,
    "nothing": None,
    "list": [],
}
SHAPES = {
    "negative": [-6, -8],
    "wrapped": [2**63 + 24, 2],
    "fraction": [6.0, 8],
    "truth": [48, True],
    "huge": [2**62, 2**62],
    "text": "68",
    "many": [1] * 100_000 + [48],
    "empty": [],
}


@attack(HUGGINGFACE, "total_size is wrong, as in folders of transformers", is_harmless=True)
def folder_total_size(location: Location) -> None:
    edit_json(location.directory / INDEX, metadata={"total_size": -(10**30)})


def folder_names(location: Location, name: Any) -> None:
    edit_json(location.directory / INDEX, weight_map={"block": FIRST, "half": name})


attacks_with(HUGGINGFACE, "the index names a file: {}", NAMES, folder_names)


def folder_map(location: Location, value: Any) -> None:
    edit_json(location.directory / INDEX, weight_map=value)


attacks_with(
    HUGGINGFACE,
    "the weight map is {}",
    {
        "nothing": None,
        "list": [FIRST],
        "swapped": {"block": SECOND, "half": FIRST},
        "incomplete": {"block": FIRST},
        "longer": {"block": FIRST, "half": SECOND, "other": SECOND},
    },
    folder_map,
    another=["incomplete"],  # the folder of a model with one file
)


def folder_has(location: Location, file: tuple[str, str]) -> None:
    (location.directory / file[0]).write_text(file[1])


attacks_with(
    HUGGINGFACE,
    "the folder has {}",
    {
        "an_index_that_is_nested_100_000_deep": (INDEX, '{"weight_map":' * DEEP + "1" + "}" * DEEP),
        "a_file_that_is_no_part_of_the_model": ("vocab.json", "[" + "[]," * 1_000_000 + "[]]"),
    },
    folder_has,
    harmless=("a_file_that_is_no_part_of_the_model",),
)


def folder_header(location: Location, header: Any) -> None:
    path = location.directory / FIRST
    data = path.read_bytes()
    path.write_bytes(safetensors(header, data[8 + int.from_bytes(data[:8], "little") :]))


def header_field(field: str) -> Callable[[Location, Any], None]:
    """Return what sets a field of the entry of `block`."""

    def build(location: Location, value: Any) -> None:
        fields = {"dtype": "F32", "shape": [6, 8], "data_offsets": [0, 192], field: value}
        folder_header(location, {"block": fields})

    return build


def folder_header_offset(location: Location, value: Any) -> None:
    header_field("data_offsets")(location, [0, value])


attacks_with(HUGGINGFACE, "the dtype of a tensor is {}", DTYPES, header_field("dtype"), name="folder_dtype")
attacks_with(HUGGINGFACE, "the shape of a tensor is {}", SHAPES, header_field("shape"), name="folder_shape")
attacks_with(HUGGINGFACE, "the end of a tensor is {}", SIZES, folder_header_offset)


attacks_with(
    HUGGINGFACE,
    "a header {}",
    {
        "is_nested_100_000_deep": b'{"block":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "has_a_million_lists": b'{"block":[' + b"[]," * 1_000_000 + b"[]]}",
    },
    folder_header,
)


def folder_header_length(location: Location, value: int) -> None:
    path = location.directory / FIRST
    path.write_bytes(struct.pack("<Q", value) + path.read_bytes()[8:])


attacks_with(
    HUGGINGFACE,
    "the length of a header is {}",
    {
        "zero": 0,
        "one": 1,
        "limit": 100_000_000,
        "gigabyte": 2**30,
        "highest": 2**63 - 1,
        "negative": 2**64 - 1,
    },
    folder_header_length,
)


@attack(HUGGINGFACE, "a file of a terabyte is sparse")
def folder_file_is_sparse(location: Location) -> None:
    os.truncate(location.directory / FIRST, 2**40)


@attack(HUGGINGFACE, "a file is a link to the same bytes outside")
def folder_file_is_a_link(location: Location) -> None:
    shutil.move(location.directory / FIRST, location.outside / "moved")
    (location.directory / FIRST).symlink_to(location.outside / "moved")


@attack(HUGGINGFACE, "a file is a pipe")
def folder_file_is_a_pipe(location: Location) -> None:
    (location.directory / SECOND).unlink()
    os.mkfifo(location.directory / SECOND)


@attack(HUGGINGFACE, "config.json is a link to a secret")
def folder_config_is_a_link(location: Location) -> None:
    (location.directory / "config.json").unlink()
    (location.directory / "config.json").symlink_to(location.outside / "secret")
