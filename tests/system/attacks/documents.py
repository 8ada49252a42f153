"""Attacks on metadata.json, on the common state, and on the notes of formats."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
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
    safetensors,
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


def _with_field(text: str, field: str) -> str:
    return text.rstrip()[:-1] + "," + field + "}"


def manifest(location: Location, change: Callable[[str], str | bytes]) -> None:
    file = location.only_file("metadata.json")
    changed = change(file.read_text())
    file.write_bytes(changed if isinstance(changed, bytes) else changed.encode())


SECRET_ENTRY = json.dumps({"file": "../../outside/secret", "nbytes": 4, "xxh3_128": ""})
MANIFESTS: dict[str, Callable[[str], str | bytes]] = {
    "is_deep": lambda _: '{"a":' * DEEP + "1" + "}" * DEEP,
    "has_a_deep_field": lambda text: _with_field(text, '"x":' + "[" * DEEP + "]" * DEEP),
    "has_a_million_lists": lambda text: _with_field(text, '"x":[' + "[]," * 100_000 + "[]]"),
    "has_a_huge_number": lambda text: text.replace('"world_size": 2', '"world_size": ' + "9" * DEEP),
    "names_two_indexes": lambda text: '{"index": ' + SECRET_ENTRY + "," + text.lstrip()[1:],
    "repeats_a_key_of_an_entry": lambda text: text.replace('"nbytes": ', '"nbytes": 7, "nbytes": '),
    "is_a_list": lambda _: "[]",
    "is_a_text": lambda _: '"metadata"',
    "is_empty": lambda _: "",
    "is_zeros": lambda _: b"\0" * 64,
    "is_not_utf8": lambda _: b'{"sharded_backend": "\xff"}',
    "is_no_object": lambda _: "NaN",
}
attacks_with(NATIVE, "metadata.json {}", MANIFESTS, manifest, harmless=("has_a_million_lists",))


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


def from_another_checkpoint(location: Location, name: str) -> None:
    shutil.copy(location.other / name, location.directory)


for base, name in ((NATIVE, "manifest"), (ZARR_3, "manifest_of_zarr")):
    attacks_with(
        base, "the {} is that of another checkpoint", {name: "metadata.json"}, from_another_checkpoint
    )
# Another library may have saved over ours: our common state is then no part of it, and a warning says so.
attacks_with(
    TORCH_DIST,
    "the {} is that of another checkpoint",
    {"metadata": ".metadata"},
    from_another_checkpoint,
    another=("metadata",),
)


@attack(NATIVE, "the index is that of another checkpoint")
def index_of_another_checkpoint(location: Location) -> None:
    other = json.loads((location.other / "metadata.json").read_bytes())["index"]
    shutil.copy(location.other / other["file"], location.directory)
    edit_manifest(location, index=other)


def file_is(location: Location, how: tuple[str, bytes]) -> None:
    """The first file that fits a pattern has other bytes."""
    pattern, data = how
    location.only_file(pattern).write_bytes(data)


attacks_with(
    NATIVE,
    "the common state is {}, under the name of this one",
    {"that_of_another_attempt": ("common-*.json", b'{"state_dict":{},"content_metadata":null}')},
    file_is,
)


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


def _tensor(shape: list[int], offsets: list[int], dtype: str = "I64") -> dict[str, Any]:
    return {"0": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


attacks_with(
    NATIVE,
    "the tensors of the common state have a header that is {}",
    {
        "endless": struct.pack("<Q", 2**63 - 1) + b"{}",
        "wrapped": struct.pack("<Q", 2**64 - 1) + b"{}",
        "of_a_gigabyte": struct.pack("<Q", 2**30) + b"{}",
        "deep": safetensors(b"[" * DEEP + b"]" * DEEP),
        "vast": safetensors(_tensor([2**40], [0, 2**43])),
        "wrapping": safetensors(_tensor([2**32, 2**32], [0, 0])),
        "backwards": safetensors(_tensor([4], [32, 0]), b"\0" * 32),
        "with_a_gap": safetensors(_tensor([4], [8, 40]), b"\0" * 40),
        "negative": safetensors(_tensor([-4], [0, -32])),
        "of_no_dtype": safetensors(_tensor([4], [0, 32], "OBJ"), b"\0" * 32),
        "of_another_width": safetensors(_tensor([4], [0, 32], "I8"), b"\0" * 32),
        "without_the_tensor": save({"9": np.zeros(4, np.int64)}),
        "truncated": safetensors(_tensor([4], [0, 32]), b"\0" * 8),
        "overlapping": safetensors(
            _tensor([4], [0, 32]) | {"1": {"dtype": "I64", "shape": [4], "data_offsets": [0, 32]}},
            b"\0" * 32,
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


attacks_with(
    TORCH_DIST,
    "the {}",
    {
        "note_is_nested_100_000_deep": ("megackpt-*.json", b"[" * DEEP),
        "note_is_a_list": ("megackpt-*.json", b"[1]"),
    },
    file_is,
)
attacks_with(
    ZARR_1,
    "the {}",
    {"list_of_files_is_an_object": (".megackpt-*.json", b'{"files": {"a": 1}, "checkpoint": 7}')},
    file_is,
)


@attack(ZARR_1, "the list of files names a file outside", is_harmless=True)
def marker_names_a_file_outside(location: Location) -> None:
    marker = location.only_file(".megackpt-*.json")
    message = json.loads(marker.read_bytes())
    entry = next(name for name, value in message.items() if isinstance(value, list))
    edit_json(marker, **{entry: [*message[entry], "../../outside/secret"]})


def files_are(location: Location, data: bytes) -> None:
    put_named(location, "files", data)


attacks_with(
    ZARR_3,
    "the list of files has {}",
    {"no_names": b'{"files": [[["a"]]]}', "names_outside": b'{"files": ["../../outside/zarr.json"]}'},
    files_are,
)
attacks_with(
    ZARR_3,
    "keys that were removed are given as {}",
    {"numbers": [1, 2]},
    field_is("removed_prefixes"),
    name="removed",
)
