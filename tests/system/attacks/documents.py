"""Attacks on metadata.json, on the common state, and on the notes of formats."""

from __future__ import annotations

import json
import shutil
import struct
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.system.attacks.crafting import (
    NATIVE,
    TORCH_DIST,
    ZARR_1,
    ZARR_3,
    Location,
    attack,
    attacks_with,
    edit_json,
    edit_manifest,
    field_is,
    put_named,
)

DEEP = 100_000
NAMES = {
    "parent": "../../outside/secret",
    "inner_parent": "data/../../../outside/secret",
    "absolute": "/etc/passwd",
    "device": "/dev/zero",
    "url": "file:///etc/passwd",
    "backslash": "..\\..\\outside\\secret",
    "nul": "metadata.json\0.json",
    "newline": "a\nb",
    "long": "x" * 5000,
    "long_path": "/".join(["d" * 200] * 40),
    "surrogate": "\ud800",
    "dot": ".",
    "empty": "",
    "directory": "data",
    "itself": "metadata.json",
    "number": 7,
    "list": ["metadata.json"],
}
SIZES = {
    "negative": -1,
    "lowest": -(2**63),
    "highest": 2**63 - 1,
    "wrapped": 2**64,
    "terabyte": 2**40,
    "fraction": 186.0,
    "text": "186",
    "truth": True,
    "nothing": None,
}


@attack(NATIVE, "metadata.json is nested 100,000 deep")
def manifest_is_deep(location: Location) -> None:
    location.only_file("metadata.json").write_text('{"a":' * DEEP + "1" + "}" * DEEP)


@attack(NATIVE, "a field of metadata.json is nested 100,000 deep")
def manifest_has_a_deep_field(location: Location) -> None:
    text = location.only_file("metadata.json").read_text().rstrip()[:-1]
    location.only_file("metadata.json").write_text(text + ',"x":' + "[" * DEEP + "]" * DEEP + "}")


@attack(NATIVE, "metadata.json has a million lists", is_harmless=True)
def manifest_is_wide(location: Location) -> None:
    text = location.only_file("metadata.json").read_text().rstrip()[:-1]
    location.only_file("metadata.json").write_text(text + ',"x":[' + "[]," * 100_000 + "[]]}")


@attack(NATIVE, "metadata.json has a number of 100,000 digits")
def manifest_has_a_huge_number(location: Location) -> None:
    text = (
        location.only_file("metadata.json")
        .read_text()
        .replace('"world_size": 2', '"world_size": ' + "9" * DEEP)
    )
    location.only_file("metadata.json").write_text(text)


@attack(NATIVE, "metadata.json is a terabyte long")
def manifest_is_endless(location: Location) -> None:
    with location.only_file("metadata.json").open("r+b") as file:
        file.truncate(1 << 40)


@attack(NATIVE, "metadata.json names two indexes")
def manifest_repeats_a_key(location: Location) -> None:
    text = location.only_file("metadata.json").read_text()
    entry = json.dumps({"file": "../../outside/secret", "nbytes": 4, "xxh3_128": ""})
    location.only_file("metadata.json").write_text('{"index": ' + entry + "," + text.lstrip()[1:])


@attack(NATIVE, "a key stands twice in an entry of metadata.json")
def manifest_repeats_a_nested_key(location: Location) -> None:
    text = location.only_file("metadata.json").read_text()
    location.only_file("metadata.json").write_text(text.replace('"nbytes": ', '"nbytes": 7, "nbytes": '))


def manifest_is(location: Location, text: bytes) -> None:
    location.only_file("metadata.json").write_bytes(text)


attacks_with(
    NATIVE,
    "metadata.json is {}",
    {
        "a_list": b"[]",
        "a_text": b'"metadata"',
        "empty": b"",
        "zeros": b"\0" * 64,
        "not_utf8": b'{"sharded_backend": "\xff"}',
        "no_object": b"NaN",
    },
    manifest_is,
)


BACKENDS = {
    "a_list": ["megackpt"],
    "an_object": {"a": 1},
    "a_module": "os.system",
    "other": "torch_dist",
    "none": None,
}
VERSIONS = {"huge": 10**30, "negative": -1, "text": "1"}

for base, name, fields, claim, values in (
    (NATIVE, "backend_is", ("sharded_backend",), "the format is {}", BACKENDS),
    (NATIVE, "version_is", ("sharded_backend_version",), "the version of the format is {}", VERSIONS),
    (NATIVE, "index_file_is", ("index", "file"), "the index is the file {}", NAMES),
    (NATIVE, "common_file_is", ("common", "file"), "the common state is the file {}", NAMES),
    (NATIVE, "index_size_is", ("index", "nbytes"), "the index has {} bytes", SIZES),
    (
        *(NATIVE, "common_size_is", ("common_tensors", "nbytes")),
        *("the tensors of the common state have {} bytes", SIZES),
    ),
    (ZARR_3, "zarr_common_is", ("common", "file"), "the common state is the file {}", NAMES),
    (ZARR_3, "zarr_arrays_are", ("arrays",), "the arrays are in the directory {}", NAMES),
):
    attacks_with(base, claim, values, field_is(*fields), name=name)


@attack(NATIVE, "metadata.json is that of another checkpoint")
def manifest_of_another_checkpoint(location: Location) -> None:
    shutil.copy(location.other / "metadata.json", location.directory)


@attack(ZARR_3, "metadata.json is that of another checkpoint")
def zarr_manifest_of_another_checkpoint(location: Location) -> None:
    shutil.copy(location.other / "metadata.json", location.directory)


# Another library may have saved over ours: our common state is then no part of it, and a warning says so.
@attack(TORCH_DIST, ".metadata is that of another checkpoint", is_another=True)
def metadata_of_another_checkpoint(location: Location) -> None:
    shutil.copy(location.other / ".metadata", location.directory)


@attack(NATIVE, "the index is that of another checkpoint")
def index_of_another_checkpoint(location: Location) -> None:
    other = json.loads((location.other / "metadata.json").read_bytes())["index"]
    shutil.copy(location.other / other["file"], location.directory)
    edit_manifest(location, index=other)


@attack(NATIVE, "the common state is that of another attempt, under the name of this one")
def common_under_another_name(location: Location) -> None:
    location.only_file("common-*.json").write_bytes(b'{"state_dict":{},"content_metadata":null}')


def common_is(location: Location, text: str | bytes) -> None:
    put_named(location, "common", text if isinstance(text, bytes) else text.encode())


def _state(text: str) -> str:
    return '{"state_dict":{"a":' + text + '},"content_metadata":null}'


attacks_with(
    NATIVE,
    "the common state is {}",
    {
        "deep": _state("[" * DEEP + "]" * DEEP),
        "sixty_five_deep": _state("[" * 70 + "]" * 70),
        "repeated": '{"state_dict":{},"state_dict":{"x":1},"content_metadata":null}',
        "a_huge_number": _state("9" * DEEP),
        "infinite": _state("1e999"),
        "a_list": "[]",
        "of_no_tag": _state('{"$exec":"import os"}'),
        "of_an_unregistered_codec": _state('{"$registered":{"name":"os.system","value":"id"}}'),
        "an_enum_of_a_module": _state('{"$enum":{"class":"os.system","name":"id"}}'),
        "a_tensor_twice": _state('[{"$tensor":0},{"$tensor":0}]'),
        "a_tensor_too_many": _state('{"$tensor":99}'),
        "a_negative_tensor": _state('{"$tensor":-1}'),
        "a_reference_to_nothing": _state('[{"$tensor":0},{"$array":"nothing"}]'),
        "a_reference_to_objects": _state('[{"$tensor":0},{"$array":"object"}]'),
        "a_reference_twice": _state('[{"$tensor":0},{"$array":"block"},{"$array":"block"}]'),
        "a_reference_that_is_no_text": _state('[{"$tensor":0},{"$array":["block"]}]'),
        "an_array_of_objects": _state('{"$ndarray":{"dtype":"|O","shape":[1],"data":0}}'),
        "a_vast_array": _state('{"$ndarray":{"dtype":"<f8","shape":[1099511627776],"data":0}}'),
        "a_vast_scalar": _state('{"$npscalar":{"dtype":"<U999999999","hex":""}}'),
        "a_vast_size": _state('{"$size":[9223372036854775807,9223372036854775807]}'),
        "a_device": _state('{"$device":"cuda:9999"}'),
        "a_generator_elsewhere": _state('{"$generator":{"device":"meta","state":{"$tensor":0}}}'),
        "a_surrogate": _state('"\\ud800"'),
        "not_utf8": b'{"state_dict":"\xff"}',
        "a_key_of_a_dunder": '{"__class__":{"__reduce__":["os.system",["id"]]}}',
        "a_decimal_bomb": _state('{"$decimal":"1e999999999999999999"}'),
        "a_fraction_by_zero": _state('{"$fraction":[1,0]}'),
        "a_range": _state('{"$range":[0,9223372036854775807,1]}'),
    },
    common_is,
    another=("a_reference_to_nothing", "a_reference_to_objects", "a_reference_twice"),
)


def tensors_are(location: Location, data: bytes) -> None:
    put_named(location, "common_tensors", data)


def _header(entries: dict[str, Any], *, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tensor(shape: list[int], offsets: list[int], dtype: str = "I64") -> dict[str, Any]:
    return {"0": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


attacks_with(
    NATIVE,
    "the tensors of the common state have a header that is {}",
    {
        "endless": struct.pack("<Q", 2**63 - 1) + b"{}",
        "wrapped": struct.pack("<Q", 2**64 - 1) + b"{}",
        "of_a_gigabyte": struct.pack("<Q", 2**30) + b"{}",
        "deep": struct.pack("<Q", 2 * DEEP) + b"[" * DEEP + b"]" * DEEP,
        "vast": _header(_tensor([2**40], [0, 2**43])),
        "wrapping": _header(_tensor([2**32, 2**32], [0, 0])),
        "backwards": _header(_tensor([4], [32, 0]), data=b"\0" * 32),
        "with_a_gap": _header(_tensor([4], [8, 40]), data=b"\0" * 40),
        "negative": _header(_tensor([-4], [0, -32])),
        "of_no_dtype": _header(_tensor([4], [0, 32], "OBJ"), data=b"\0" * 32),
        "of_another_width": _header(_tensor([4], [0, 32], "I8"), data=b"\0" * 32),
        "without_the_tensor": save({"9": np.zeros(4, np.int64)}),
        "truncated": _header(_tensor([4], [0, 32]), data=b"\0" * 8),
        "overlapping": _header(
            _tensor([4], [0, 32]) | {"1": {"dtype": "I64", "shape": [4], "data_offsets": [0, 32]}},
            data=b"\0" * 32,
        ),
        "twice": struct.pack("<Q", 96)
        + b'{"0":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"0":{"dtype":"I64","shape":[1],'.ljust(48)
        + b'"data_offsets":[0,8]}}'.ljust(48)
        + b"\0" * 8,
    },
    tensors_are,
)


@attack(TORCH_DIST, "the note of the save names a file outside")
def note_names_a_file_outside(location: Location) -> None:
    note = location.only_file("megackpt-*.json")
    message = json.loads(note.read_bytes())
    edit_json(note, index={**message["index"], "file": "../../outside/secret"})


@attack(TORCH_DIST, "the note of the save is nested 100,000 deep")
def note_is_deep(location: Location) -> None:
    location.only_file("megackpt-*.json").write_text("[" * DEEP)


@attack(TORCH_DIST, "the note of the save is a list")
def note_is_a_list(location: Location) -> None:
    location.only_file("megackpt-*.json").write_text("[1]")


@attack(ZARR_1, "the list of files names a file outside", is_harmless=True)
def marker_names_a_file_outside(location: Location) -> None:
    marker = location.only_file(".megackpt-*.json")
    message = json.loads(marker.read_bytes())
    entry = next(name for name, value in message.items() if isinstance(value, list))
    edit_json(marker, **{entry: [*message[entry], "../../outside/secret"]})


@attack(ZARR_1, "the list of files is an object")
def marker_is_no_list(location: Location) -> None:
    location.only_file(".megackpt-*.json").write_text('{"files": {"a": 1}, "checkpoint": 7}')


@attack(ZARR_3, "the list of files is no list of names")
def files_are_no_names(location: Location) -> None:
    put_named(location, "files", b'{"files": [[["a"]]]}')


@attack(ZARR_3, "the list of files names files outside")
def files_are_outside(location: Location) -> None:
    put_named(location, "files", b'{"files": ["../../outside/zarr.json"]}')


@attack(ZARR_3, "keys that were removed are given as numbers")
def removed_keys_are_numbers(location: Location) -> None:
    edit_manifest(location, removed_prefixes=[1, 2])
