"""Attacks by what DCP pickles: `.metadata` of the right classes that lies, and items of tensors."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.system.attacks.crafting import DCP, Location, attacks_with
from tests.system.attacks.opcodes import pickled, tensor, zipped


def _edit_metadata(location: Location, change: Callable[[Any], None]) -> None:
    file = location.directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _block(metadata: Any) -> Any:
    return metadata.state_dict_metadata["block"]


def _set(chosen: Callable[[Any], Iterable[Any]]) -> Callable[..., Callable[[Any], None]]:
    """Return a function that takes fields, and returns what sets them in all that is chosen."""

    def with_fields(**fields: Any) -> Callable[[Any], None]:
        def change(metadata: Any) -> None:
            for target in chosen(metadata):
                for name, value in fields.items():
                    setattr(target, name, value)

        return change

    return with_fields


_file_entries = _set(lambda metadata: metadata.storage_data.values())
_entry = _set(lambda metadata: [_block(metadata)])
_chunk = _set(lambda metadata: [_block(metadata).chunks[0]])
_properties = _set(lambda metadata: [_block(metadata).properties])


def _many_names(metadata: Any) -> None:
    """An object in an array of 10**15, one of which is there."""
    entry = metadata.state_dict_metadata.pop("object")
    name = "object/shard_999999999999999_1000000000000000"
    metadata.state_dict_metadata[name] = entry
    (index,) = [k for k in metadata.storage_data if k.fqn == "object"]
    metadata.storage_data[type(index)(name)] = metadata.storage_data.pop(index)


def _same_position(metadata: Any) -> None:
    first = next(iter(metadata.storage_data.values()))
    metadata.storage_data.update(dict.fromkeys(metadata.storage_data, first))


METADATA: dict[str, Callable[[Any], None]] = {
    "files_outside": _file_entries(relative_path="../../outside/secret"),
    "files_absolute": _file_entries(relative_path="/etc/passwd"),
    "files_devices": _file_entries(relative_path="/dev/zero"),
    "files_with_nul": _file_entries(relative_path="__0_0\0.distcp"),
    "files_bytes": _file_entries(relative_path=b"__0_0.distcp"),
    "files_metadata": _file_entries(relative_path=".metadata", offset=0, length=10),
    "files_directories": _file_entries(relative_path="."),
    "files_long": _file_entries(relative_path="x" * 100_000),
    "offsets_negative": _file_entries(offset=-1),
    "offsets_beyond": _file_entries(offset=2**40),
    "offsets_highest": _file_entries(offset=2**63 - 1),
    "offsets_wrapping": _file_entries(offset=2**62, length=2**62),
    "offsets_fractions": _file_entries(offset=0.5),
    "lengths_vast": _file_entries(length=2**40),
    "lengths_zero": _file_entries(length=0),
    "lengths_truths": _file_entries(length=True),
    "transforms": _file_entries(transform_descriptors=["stream.os.system"]),
    "chunk_beyond": _chunk(offsets=torch.Size([2**40, 0])),
    "chunk_vast": _chunk(sizes=torch.Size([2**40, 8])),
    "chunk_negative": _chunk(sizes=(-6, -8)),
    "chunk_fraction": _chunk(sizes=(6.0, 8)),
    "chunk_of_one_dim": _chunk(sizes=torch.Size([48])),
    "shape_vast": _entry(size=torch.Size([2**40, 8])),
    "shape_wrapping": _entry(size=torch.Size([2**32, 2**32])),
    "shape_of_a_text": _entry(size="68"),
    "shape_other": _entry(size=torch.Size([8, 6])),
    "no_chunks": _entry(chunks=[]),
    "chunks_a_text": _entry(chunks="chunks"),
    "dtype_wider": _properties(dtype=torch.float64),
    "dtype_equal": _properties(dtype=torch.int32),
    "dtype_text": _properties(dtype="os.system"),
    "dtype_quantized": _properties(dtype=torch.quint4x2),
    "tables_swapped": lambda m: setattr(m, "state_dict_metadata", m.storage_data),
    "tables_none": lambda m: setattr(m, "storage_data", None),
    "keys_of_numbers": lambda m: m.state_dict_metadata.update({7: _block(m)}),
    "keys_with_surrogates": lambda m: m.state_dict_metadata.update({"\ud800": _block(m)}),
    "entries_of_text": lambda m: m.state_dict_metadata.update(block="entry"),
    "objects_without_end": _many_names,
    "same_place_of_all": _same_position,
}
attacks_with(DCP, ".metadata lies: {}", METADATA, _edit_metadata)


def item_is(location: Location, data: bytes) -> None:
    """The tensor of the checkpoint is this item."""
    (location.directory / "item.distcp").write_bytes(data)

    def change(metadata: Any) -> None:
        (info,) = [v for k, v in metadata.storage_data.items() if k.fqn == "block"]
        info.relative_path, info.offset, info.length = "item.distcp", 0, len(data)

    _edit_metadata(location, change)


def _item(numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    claims = tensor(numel=numel, shape=shape, stride=stride)
    return zipped(pickled(claims), {"data/0": b"\0" * 192})


ITEMS = {
    "longer_than_its_record": _item(48 << 10, (6, 8), (8192, 1)),
    "repeating": _item(48, (6, 8), (0, 0)),
    "transposed_beyond": _item(48, (6, 8), (48, 48)),
    "a_pickle": pickle.dumps({"a": 1}),
    "a_safetensors_header_without_end": struct.pack("<Q", 2**40) + b"{}",
    "a_deep_safetensors_header": struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000,
}
attacks_with(DCP, "the item of a tensor is {}", ITEMS, item_is, another=("repeating",))
