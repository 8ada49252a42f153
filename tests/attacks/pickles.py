# ruff: noqa: E501 - opcodes are read by the line
"""Attacks by pickles: `.metadata` of DCP, and what torch.save writes, in objects and in common state."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.attacks.crafting import DCP, ZARR_1, Place, attack, attacks_with


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _call(function: bytes, *arguments: bytes) -> bytes:
    """Opcodes that call a function."""
    return function + b"(" + b"".join(arguments) + b"tR"


def _pickle(*opcodes: bytes) -> bytes:
    return b"\x80\x02" + b"".join(opcodes) + b"."


def _makes(ran: str) -> dict[str, bytes]:
    """Pickles that make a directory, each in another way."""
    source = f"__import__('os').mkdir({ran!r})"
    getattr_ = _global("builtins", "getattr")
    os_module = _call(_global("builtins", "__import__"), _text("os"))
    return {
        "os_mkdir": _pickle(_call(_global("os", "mkdir"), _text(ran))),
        "posix_mkdir": _pickle(_call(_global("posix", "mkdir"), _text(ran))),
        "os_system": _pickle(_call(_global("os", "system"), _text(f"mkdir {ran}"))),
        "nt_system": _pickle(_call(_global("nt", "system"), _text(f"mkdir {ran}"))),
        "subprocess": _pickle(_call(_global("subprocess", "check_output"), b"(" + _text("mkdir") + _text(ran) + b"l")),
        "eval": _pickle(_call(_global("builtins", "eval"), _text(source))),
        "exec": _pickle(_call(_global("builtins", "exec"), _text(source))),
        "eval_of_python_2": _pickle(_call(_global("__builtin__", "eval"), _text(source))),
        "getattr": _pickle(_call(_call(getattr_, os_module, _text("mkdir")), _text(ran))),
        "operator": _pickle(_call(_global("operator", "methodcaller"), _text("mkdir"), _text(ran))),
        "partial": _pickle(_call(_call(_global("functools", "partial"), _global("os", "mkdir"), _text(ran)))),
        "map": _pickle(
            _call(_global("builtins", "list"), _call(_global("builtins", "map"), _global("os", "mkdir"), b"(" + _text(ran) + b"l"))
        ),
        "dotted_name": b"\x80\x04" + b"\x8c\x02os" + b"\x8c\x05mkdir" + b"\x93" + b"(" + _text(ran) + b"tR.",
        "dotted_attribute": b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93(" + _text(ran) + b"tR.",
        "torch_os": b"\x80\x04\x8c\x0dtorch.storage\x8c\x08io.open\x93(" + _text(ran) + b"X\x01\0\0\0wtR.",
        "numpy_testing": _pickle(_call(_global("numpy.testing._private.utils", "runstring"), _text(source), b"}")),
        "torch_hub": _pickle(_call(_global("torch.utils.cpp_extension", "load_inline"), _text("a"), _text("b"))),
        "torch_jit": _pickle(_call(_global("torch.jit", "load"), _text(ran))),
        "torch_load": _pickle(_call(_global("torch.serialization", "load"), _text(ran))),
        "torch_compile": _pickle(_call(_global("torch._dynamo.utils", "import_submodule"), _text("os"))),
        "copyreg": _pickle(_call(_global("copyreg", "_reconstructor"), _global("os", "mkdir"), _global("builtins", "object"), b"N")),
        "copyreg_extension": _pickle(b"\x82\x01"),
        "pickle_loads": _pickle(_call(_global("pickle", "loads"), b"U\x05cos.")),
        "code_object": _pickle(_call(_global("types", "CodeType"), b"K\0")),
        "import": _pickle(_call(_global("importlib", "import_module"), _text("antigravity"))),
        "runpy": _pickle(_call(_global("runpy", "run_path"), _text(ran))),
        "inst": b"(X" + struct.pack("<I", len(ran)) + ran.encode() + b"ios\nmkdir\n.",
        "obj": b"\x80\x02(" + _global("os", "mkdir") + _text(ran) + b"o.",
        "newobj": _pickle(_global("os", "mkdir"), b"(", _text(ran), b"t\x81"),
        "build": _pickle(_global("torch", "Size"), b")\x81}", _text("__class__"), _global("os", "mkdir"), b"sb"),
        "setstate": _pickle(_global("collections", "OrderedDict"), b")R}", _text("__setstate__"), _global("os", "mkdir"), b"sb", _text(ran), b"b"),
        "default_factory": _pickle(_call(_global("collections", "defaultdict"), _global("os", "getcwd"))),
        "persistent": b"\x80\x02" + _text("storage") + b"Q.",
        "printer": _pickle(_call(_global("builtins", "print"), _text("CANARY-of-a-file-outside"))),
        "reader": _pickle(_call(_global("numpy", "fromfile"), _text(f"{ran}/../outside/secret"))),
        "reader_of_text": _pickle(_call(_global("numpy", "genfromtxt"), _text(f"{ran}/../outside/secret"))),
        "reader_of_maps": _pickle(_call(_global("numpy", "memmap"), _text(f"{ran}/../outside/secret"))),
        "storage_from_file": _pickle(_call(_global("torch", "from_file"), _text(f"{ran}/../outside/secret"))),
        "linecache": _pickle(_call(_global("linecache", "getlines"), _text(f"{ran}/../outside/secret"))),
    }  # fmt: skip


WEIGHTS = {
    "memo_number": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "memo_text_number": b"\x80\x04Np4000000000\n.",
    "negative_memo": b"\x80\x02Np-1\n.",
    "long_bytes": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00abc.",
    "long_text": b"\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00abc.",
    "long_integer": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "integer_of_a_million_digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "stack_depth": b"\x80\x02" + b"(" * 1_000_000 + b"t" * 1_000_000 + b".",
    "lists_in_lists": b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "tuples_in_tuples": b"\x80\x02N" + b"\x85" * 1_000_000 + b".",
    "doubling": b"\x80\x02]q\0" + b"(h\0h\0lq\0" * 200 + b".",
    "doubling_tuples": b"\x80\x02)q\0" + b"h\0h\0\x86q\0" * 60 + b".",
    "contains_itself": b"\x80\x02]q\0h\0a.",
    "empty": b"",
    "no_end": b"\x80\x04]",
    "empty_stack": b".",
    "unknown_opcode": b"\x80\x02\xff.",
    "protocol_99": b"\x80\x63N.",
    "repeated_bytes": _pickle(_call(_global("builtins", "bytes"), b"J\xff\xff\xff\x7f")),
    "vast_bytearray": _pickle(_call(_global("builtins", "bytearray"), b"J\xff\xff\xff\x7f")),
    "vast_range": _pickle(
        _call(_global("builtins", "list"), _call(_global("builtins", "range"), b"J\xff\xff\xff\x7f"))
    ),
    "vast_list_of_a_text": _pickle(_call(_global("builtins", "list"), _text("a" * 1000))),
    "vast_array": _pickle(_call(_global("numpy", "zeros"), b"\x8a\x05\0\0\0\0\1")),
    "vast_size": _pickle(_call(_global("torch", "Size"), b"(\x8a\x09" + b"\xff" * 8 + b"\0t")),
}


def metadata_runs(place: Place, way: str) -> None:
    (place.directory / ".metadata").write_bytes(_makes(str(place.ran))[way])


attacks_with(DCP, ".metadata runs code by {}", {name: name for name in _makes("")}, metadata_runs)


def metadata_weighs(place: Place, data: bytes) -> None:
    (place.directory / ".metadata").write_bytes(data)


attacks_with(DCP, ".metadata takes memory or stack by {}", WEIGHTS, metadata_weighs)


def _zipped(pickled: bytes, records: dict[str, bytes] | None = None) -> bytes:
    """What torch.save would write of a pickle and some records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
        for name, data in (records or {}).items():
            archive.writestr(f"archive/{name}", data)
        archive.writestr("archive/version", "3\n")
    return out.getvalue()


def common_runs(place: Place, way: str) -> None:
    (place.directory / "common.pt").write_bytes(_zipped(_makes(str(place.ran))[way]))


attacks_with(ZARR_1, "common.pt runs code by {}", {name: name for name in _makes("")}, common_runs)


def object_weighs(place: Place, data: bytes) -> None:
    place.one("object/*.pt").write_bytes(_zipped(data))


attacks_with(
    ZARR_1,
    "an object takes memory or stack by {}",
    WEIGHTS,
    object_weighs,
    another=("memo_number", "protocol_99", "contains_itself", "vast_size"),
)


@attack(ZARR_1, "common.pt is a plain pickle of the first format of torch.save, which runs code")
def common_of_old_runs(place: Place) -> None:
    magic = (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(1001, 2)
        + pickle.dumps({"little_endian": True}, 2)
    )
    (place.directory / "common.pt").write_bytes(
        magic + _makes(str(place.ran))["os_mkdir"] + pickle.dumps([], 2)
    )


@attack(ZARR_1, "common.pt is a tar file, as torch.save once wrote")
def common_is_a_tar(place: Place) -> None:
    import tarfile

    data = _makes(str(place.ran))["os_mkdir"]
    with tarfile.open(place.directory / "common.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors", "../../outside/secret"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@attack(ZARR_1, "common.pt is a TorchScript archive")
def common_is_torchscript(place: Place) -> None:
    torch_script = _zipped(_pickle(b"N"), {"constants.pkl": _pickle(b"N"), "code/__torch__.py": b"import os"})
    (place.directory / "common.pt").write_bytes(torch_script)


def _tensor(
    *, numel: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, number: str = "0"
) -> bytes:
    """A pickle of a dict with a tensor of these claims."""

    def whole(n: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", n)

    pid = (
        b"("
        + _text("storage")
        + _global("torch", "FloatStorage")
        + _text(number)
        + _text("cpu")
        + whole(numel)
        + b"tQ"
    )
    numbers = [b"(" + b"".join(map(whole, values)) + b"t" for values in (shape, stride)]
    hooks = _global("collections", "OrderedDict") + b")R"
    tensor = _call(
        _global("torch._utils", "_rebuild_tensor_v2"), pid, whole(offset), *numbers, b"\x89", hooks
    )
    return _pickle(b"}", _text("step"), tensor, b"s")


TENSORS = {
    "longer_than_its_record": _tensor(numel=1 << 20, shape=(1 << 20,), stride=(1,)),
    "of_a_terabyte": _tensor(numel=1 << 38, shape=(1 << 38,), stride=(1,)),
    "of_negative_length": _tensor(numel=-4, shape=(4,), stride=(1,)),
    "of_wrapping_length": _tensor(numel=(1 << 62) + 4, shape=(4,), stride=(1,)),
    "behind_its_storage": _tensor(numel=4, shape=(4,), stride=(1,), offset=1 << 20),
    "before_its_storage": _tensor(numel=4, shape=(4,), stride=(1,), offset=-64),
    "with_vast_strides": _tensor(numel=4, shape=(4,), stride=(1 << 40,)),
    "with_negative_strides": _tensor(numel=4, shape=(4,), stride=(-1,)),
    "of_negative_shape": _tensor(numel=4, shape=(-4,), stride=(1,)),
    "of_wrapping_shape": _tensor(numel=4, shape=(1 << 32, 1 << 32), stride=(0, 0)),
    "of_a_record_outside": _tensor(numel=4, shape=(4,), stride=(1,), number="../../../outside/secret"),
    "of_no_record": _tensor(numel=4, shape=(4,), stride=(1,), number="77"),
    "repeating_its_storage": _tensor(numel=4, shape=(1 << 40,), stride=(0,)),
}


def common_tensor(place: Place, data: bytes) -> None:
    (place.directory / "common.pt").write_bytes(
        _zipped(data, {"data/0": np.arange(4, dtype=np.float32).tobytes()})
    )


attacks_with(ZARR_1, "common.pt has a tensor {}", TENSORS, common_tensor, another=("repeating_its_storage",))


@attack(ZARR_1, "common.pt is a zip file of deflated zeros")
def common_is_a_bomb(place: Place) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("archive/data.pkl", _tensor(numel=1 << 29, shape=(1 << 29,), stride=(1,)))
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(1 << 7):
                record.write(b"\0" * (1 << 24))
    (place.directory / "common.pt").write_bytes(out.getvalue())


@attack(ZARR_1, "in common.pt, all of many records are the same bytes")
def common_of_one_record(place: Place) -> None:
    size, count = 1 << 25, 64
    pid = (
        b"("
        + _text("storage")
        + _global("torch", "ByteStorage")
        + b"%b"
        + _text("cpu")
        + b"J"
        + struct.pack("<i", size)
        + b"tQ"
    )
    hooks = _global("collections", "OrderedDict") + b")R"
    numbers = b"(J" + struct.pack("<i", size) + b"t(K\1t"
    tensors = [
        _call(
            _global("torch._utils", "_rebuild_tensor_v2"),
            pid % _text(str(i)),
            b"K\0",
            numbers,
            b"\x89",
            hooks,
        )
        for i in range(count)
    ]
    (place.directory / "common.pt").write_bytes(_overlapping(_pickle(b"](", *tensors, b"e"), size, count))


def _overlapping(pickled: bytes, size: int, count: int) -> bytes:
    """A zip file whose directory names one record of zeros many times."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", b"\0" * size)
        first = archive.infolist()[-1]
        for number in range(1, count):
            info = zipfile.ZipInfo(f"archive/data/{number}")
            info.header_offset, info.CRC = first.header_offset, first.CRC
            info.compress_size = info.file_size = size
            archive.filelist.append(info)
    return out.getvalue()


@attack(ZARR_1, "common.pt says that a record has a terabyte")
def common_of_a_record_of_a_terabyte(place: Place) -> None:
    data = bytearray(_zipped(_pickle(b"}"), {"data/0": b"x" * 64}))
    at = data.index(b"PK\1\2")
    struct.pack_into("<II", data, at + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    (place.directory / "common.pt").write_bytes(data)


class _Holds:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


ARRAYS: dict[str, Callable[[], Any]] = {
    "of_objects": lambda: np.array([{"a": 1}, None], object),
    "of_structures": lambda: np.zeros(2, [("a", "O"), ("b", "<f8")]),
    "of_longer_text": lambda: np.array(["a" * 100]),
    "of_void": lambda: np.zeros(2, "V16"),
}


def common_array(place: Place, make: Callable[[], Any]) -> None:
    out = io.BytesIO()
    torch.save({"step": make()}, out)
    (place.directory / "common.pt").write_bytes(out.getvalue())


attacks_with(ZARR_1, "common.pt has an array {}", ARRAYS, common_array, another=("of_longer_text",))


def _forged_array(state: tuple[Any, ...]) -> _Holds:
    made = np.zeros(1).__reduce__()
    return _Holds(made[0], made[1], state)


FORGED: dict[str, Callable[[], Any]] = {
    "shorter_than_its_shape": lambda: _forged_array((1, (1 << 20,), np.dtype("<f8"), False, b"\0" * 8)),
    "of_a_vast_shape": lambda: _forged_array((1, (1 << 40, 1 << 40), np.dtype("<f8"), False, b"")),
    "of_pointers": lambda: _forged_array((1, (1,), np.dtype("O"), False, b"\0" * 8)),
    "of_pointers_in_a_list": lambda: _forged_array((1, (1,), np.dtype("O"), False, [os.system])),
    "of_negative_shape": lambda: _forged_array((1, (-1,), np.dtype("<f8"), False, b"\0" * 8)),
}
attacks_with(ZARR_1, "common.pt has a forged array {}", FORGED, common_array)


@attack(ZARR_1, "common.pt is no dict")
def common_is_a_number(place: Place) -> None:
    torch.save(7, place.directory / "common.pt")


@attack(ZARR_1, "an object is an array with pickles in it")
def object_is_a_pickled_array(place: Place) -> None:
    np.save(
        place.outside / "a.npy", np.array([_Holds(os.mkdir, (str(place.ran),))], object), allow_pickle=True
    )
    place.one("object/*.pt").write_bytes((place.outside / "a.npy").read_bytes())


def _edit_metadata(place: Place, change: Callable[[Any], None]) -> None:
    file = place.directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _places(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


def _tensor_entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata["block"]


def _chunk(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(_tensor_entry(metadata).chunks[0], name, value)

    return change


def _entry(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(_tensor_entry(metadata), name, value)

    return change


def _dtype(dtype: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        _tensor_entry(metadata).properties.dtype = dtype

    return change


def _many_names(metadata: Any) -> None:
    """An object in an array of 10**15, one of which is there."""
    entry = metadata.state_dict_metadata.pop("object")
    name = "object/shard_999999999999999_1000000000000000"
    metadata.state_dict_metadata[name] = entry
    (index,) = [k for k in metadata.storage_data if k.fqn == "object"]
    metadata.storage_data[type(index)(name)] = metadata.storage_data.pop(index)


METADATA: dict[str, Callable[[Any], None]] = {
    "files_outside": _places(relative_path="../../outside/secret"),
    "files_absolute": _places(relative_path="/etc/passwd"),
    "files_devices": _places(relative_path="/dev/zero"),
    "files_with_nul": _places(relative_path="__0_0\0.distcp"),
    "files_bytes": _places(relative_path=b"__0_0.distcp"),
    "files_metadata": _places(relative_path=".metadata", offset=0, length=10),
    "files_directories": _places(relative_path="."),
    "files_long": _places(relative_path="x" * 100_000),
    "offsets_negative": _places(offset=-1),
    "offsets_beyond": _places(offset=2**40),
    "offsets_highest": _places(offset=2**63 - 1),
    "offsets_wrapping": _places(offset=2**62, length=2**62),
    "offsets_fractions": _places(offset=0.5),
    "lengths_vast": _places(length=2**40),
    "lengths_zero": _places(length=0),
    "lengths_truths": _places(length=True),
    "transforms": _places(transform_descriptors=["stream.os.system"]),
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
    "dtype_wider": _dtype(torch.float64),
    "dtype_alike": _dtype(torch.int32),
    "dtype_text": _dtype("os.system"),
    "dtype_quantized": _dtype(torch.quint4x2),
    "tables_swapped": lambda m: (setattr(m, "state_dict_metadata", m.storage_data), None)[1],
    "tables_none": lambda m: setattr(m, "storage_data", None),
    "keys_of_numbers": lambda m: m.state_dict_metadata.update({7: _tensor_entry(m)}),
    "keys_with_surrogates": lambda m: m.state_dict_metadata.update({"\ud800": _tensor_entry(m)}),
    "entries_of_text": lambda m: m.state_dict_metadata.update(block="entry"),
    "objects_without_end": _many_names,
    "same_place_of_all": lambda m: [m.storage_data.update({k: next(iter(m.storage_data.values()))}) for k in list(m.storage_data)] and None,
}  # fmt: skip
attacks_with(DCP, ".metadata lies: {}", METADATA, _edit_metadata)


def item_is(place: Place, data: bytes) -> None:
    """The tensor of the checkpoint is this item."""
    (place.directory / "item.distcp").write_bytes(data)

    def change(metadata: Any) -> None:
        (info,) = [v for k, v in metadata.storage_data.items() if k.fqn == "block"]
        info.relative_path, info.offset, info.length = "item.distcp", 0, len(data)

    _edit_metadata(place, change)


def _item(numel: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    pickled = _tensor(numel=numel, shape=shape, stride=stride)
    inner = pickled[: -len(b"s.")].replace(b"}" + _text("step"), b"", 1) + b"."
    return _zipped(inner, {"data/0": b"\0" * 192})


ITEMS = {
    "longer_than_its_record": _item(48 << 10, (6, 8), (8192, 1)),
    "repeating": _item(48, (6, 8), (0, 0)),
    "transposed_beyond": _item(48, (6, 8), (48, 48)),
    "a_pickle": pickle.dumps({"a": 1}),
    "a_safetensors_header_without_end": struct.pack("<Q", 2**40) + b"{}",
    "a_deep_safetensors_header": struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000,
}
attacks_with(DCP, "the item of a tensor is {}", ITEMS, item_is, another=("repeating",))
