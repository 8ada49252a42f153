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

from tests.system.attacks.crafting import DCP, ZARR_1, Location, attack, attacks_with
from tests.system.attacks.opcodes import call, calls, named, pickled, rebuilt, storage, tensor, text, zipped


def _makes(ran: str) -> dict[str, bytes]:
    """Pickles that make a directory, each in another way."""
    source = f"__import__('os').mkdir({ran!r})"
    secret = f"{ran}/../outside/secret"
    mkdir = named("os", "mkdir")
    the_list = b"(" + text(ran) + b"l"
    return {
        "os_mkdir": calls("os", "mkdir", ran),
        "posix_mkdir": calls("posix", "mkdir", ran),
        "os_system": calls("os", "system", f"mkdir {ran}"),
        "nt_system": calls("nt", "system", f"mkdir {ran}"),
        "subprocess": calls("subprocess", "check_output", b"(" + text("mkdir") + text(ran) + b"l"),
        "eval": calls("builtins", "eval", source),
        "exec": calls("builtins", "exec", source),
        "eval_of_python_2": calls("__builtin__", "eval", source),
        "getattr": pickled(
            call(call(named("builtins", "getattr"), call(named("builtins", "__import__"), "os"), "mkdir"), ran)
        ),
        "operator": calls("operator", "methodcaller", "mkdir", ran),
        "partial": pickled(call(call(named("functools", "partial"), mkdir, ran))),
        "map": calls("builtins", "list", call(named("builtins", "map"), mkdir, the_list)),
        "dotted_name": b"\x80\x04" + b"\x8c\x02os" + b"\x8c\x05mkdir" + b"\x93" + b"(" + text(ran) + b"tR.",
        "dotted_attribute": b"\x80\x04\x8c\x05torch\x8c\x08os.mkdir\x93(" + text(ran) + b"tR.",
        "torch_os": b"\x80\x04\x8c\x0dtorch.storage\x8c\x08io.open\x93(" + text(ran) + b"X\x01\0\0\0wtR.",
        "numpy_testing": calls("numpy.testing._private.utils", "runstring", source, b"}"),
        "torch_hub": calls("torch.utils.cpp_extension", "load_inline", "a", "b"),
        "torch_jit": calls("torch.jit", "load", ran),
        "torch_load": calls("torch.serialization", "load", ran),
        "torch_compile": calls("torch._dynamo.utils", "import_submodule", "os"),
        "copyreg": calls("copyreg", "_reconstructor", mkdir, named("builtins", "object"), b"N"),
        "copyreg_extension": pickled(b"\x82\x01"),
        "pickle_loads": calls("pickle", "loads", b"U\x05cos."),
        "code_object": calls("types", "CodeType", b"K\0"),
        "import": calls("importlib", "import_module", "antigravity"),
        "runpy": calls("runpy", "run_path", ran),
        "inst": b"(X" + struct.pack("<I", len(ran)) + ran.encode() + b"ios\nmkdir\n.",
        "obj": b"\x80\x02(" + mkdir + text(ran) + b"o.",
        "newobj": pickled(mkdir, b"(", text(ran), b"t\x81"),
        "build": pickled(named("torch", "Size"), b")\x81}", text("__class__"), mkdir, b"sb"),
        "setstate": pickled(named("collections", "OrderedDict"), b")R}", text("__setstate__"), mkdir, b"sb", text(ran), b"b"),
        "default_factory": calls("collections", "defaultdict", named("os", "getcwd")),
        "persistent": b"\x80\x02" + text("storage") + b"Q.",
        "printer": calls("builtins", "print", "CANARY-of-a-file-outside"),
        "reader": calls("numpy", "fromfile", secret),
        "reader_of_text": calls("numpy", "genfromtxt", secret),
        "reader_of_maps": calls("numpy", "memmap", secret),
        "storage_from_file": calls("torch", "from_file", secret),
        "linecache": calls("linecache", "getlines", secret),
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
    "repeated_bytes": calls("builtins", "bytes", b"J\xff\xff\xff\x7f"),
    "vast_bytearray": calls("builtins", "bytearray", b"J\xff\xff\xff\x7f"),
    "vast_range": calls("builtins", "list", call(named("builtins", "range"), b"J\xff\xff\xff\x7f")),
    "vast_list_of_a_text": calls("builtins", "list", "a" * 1000),
    "vast_array": calls("numpy", "zeros", b"\x8a\x05\0\0\0\0\1"),
    "vast_size": calls("torch", "Size", b"(\x8a\x09" + b"\xff" * 8 + b"\0t"),
}


def metadata_runs(location: Location, way: str) -> None:
    (location.directory / ".metadata").write_bytes(_makes(str(location.ran))[way])


attacks_with(DCP, ".metadata runs code by {}", {name: name for name in _makes("")}, metadata_runs)


def metadata_weighs(location: Location, data: bytes) -> None:
    (location.directory / ".metadata").write_bytes(data)


attacks_with(DCP, ".metadata takes memory or stack by {}", WEIGHTS, metadata_weighs)


def common_runs(location: Location, way: str) -> None:
    (location.directory / "common.pt").write_bytes(zipped(_makes(str(location.ran))[way]))


attacks_with(ZARR_1, "common.pt runs code by {}", {name: name for name in _makes("")}, common_runs)


def object_weighs(location: Location, data: bytes) -> None:
    location.only_file("object/*.pt").write_bytes(zipped(data))


attacks_with(
    ZARR_1,
    "an object takes memory or stack by {}",
    WEIGHTS,
    object_weighs,
    another=("memo_number", "protocol_99", "contains_itself", "vast_size"),
)


@attack(ZARR_1, "common.pt is a plain pickle of the first format of torch.save, which runs code")
def common_of_old_runs(location: Location) -> None:
    magic = (
        pickle.dumps(0x1950A86A20F9469CFC6C, 2)
        + pickle.dumps(1001, 2)
        + pickle.dumps({"little_endian": True}, 2)
    )
    (location.directory / "common.pt").write_bytes(
        magic + _makes(str(location.ran))["os_mkdir"] + pickle.dumps([], 2)
    )


@attack(ZARR_1, "common.pt is a tar file, as torch.save once wrote")
def common_is_a_tar(location: Location) -> None:
    import tarfile

    data = _makes(str(location.ran))["os_mkdir"]
    with tarfile.open(location.directory / "common.pt", "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors", "../../outside/secret"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@attack(ZARR_1, "common.pt is a TorchScript archive")
def common_is_torchscript(location: Location) -> None:
    torch_script = zipped(pickled(b"N"), {"constants.pkl": pickled(b"N"), "code/__torch__.py": b"import os"})
    (location.directory / "common.pt").write_bytes(torch_script)


def step_of(**claims: Any) -> bytes:
    """A pickle of a dict with a tensor of these claims; it is honest where nothing is claimed."""
    return pickled(b"}", text("step"), tensor(**claims), b"s")


TENSORS = {
    "longer_than_its_record": step_of(numel=1 << 20, shape=(1 << 20,)),
    "of_a_terabyte": step_of(numel=1 << 38, shape=(1 << 38,)),
    "of_negative_length": step_of(numel=-4),
    "of_wrapping_length": step_of(numel=(1 << 62) + 4),
    "behind_its_storage": step_of(offset=1 << 20),
    "before_its_storage": step_of(offset=-64),
    "with_vast_strides": step_of(stride=(1 << 40,)),
    "with_negative_strides": step_of(stride=(-1,)),
    "of_negative_shape": step_of(shape=(-4,)),
    "of_wrapping_shape": step_of(shape=(1 << 32, 1 << 32), stride=(0, 0)),
    "of_a_record_outside": step_of(number="../../../outside/secret"),
    "of_no_record": step_of(number="77"),
    "repeating_its_storage": step_of(shape=(1 << 40,), stride=(0,)),
}


def common_tensor(location: Location, data: bytes) -> None:
    (location.directory / "common.pt").write_bytes(
        zipped(data, {"data/0": np.arange(4, dtype=np.float32).tobytes()})
    )


attacks_with(ZARR_1, "common.pt has a tensor {}", TENSORS, common_tensor, another=("repeating_its_storage",))


@attack(ZARR_1, "common.pt is a zip file of deflated zeros")
def common_is_a_bomb(location: Location) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("archive/data.pkl", step_of(numel=1 << 29, shape=(1 << 29,)))
        archive.writestr("archive/version", "3\n")
        with archive.open("archive/data/0", "w", force_zip64=True) as record:
            for _ in range(1 << 7):
                record.write(b"\0" * (1 << 24))
    (location.directory / "common.pt").write_bytes(out.getvalue())


@attack(ZARR_1, "in common.pt, all of many records are the same bytes")
def common_of_one_record(location: Location) -> None:
    size, count = 1 << 25, 64
    length = b"J" + struct.pack("<i", size)
    numbers = b"(" + length + b"t(K\1t"
    tensors = [rebuilt(storage("ByteStorage", str(i), length), b"K\0", numbers) for i in range(count)]
    (location.directory / "common.pt").write_bytes(_overlapping(pickled(b"](", *tensors, b"e"), size, count))


def _overlapping(data: bytes, size: int, count: int) -> bytes:
    """A zip file whose directory names one record of zeros many times."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
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
def common_of_a_record_of_a_terabyte(location: Location) -> None:
    data = bytearray(zipped(pickled(b"}"), {"data/0": b"x" * 64}))
    at = data.index(b"PK\1\2")
    struct.pack_into("<II", data, at + 20, 0xFFFFFFF0, 0xFFFFFFF0)
    (location.directory / "common.pt").write_bytes(data)


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


def common_array(location: Location, make: Callable[[], Any]) -> None:
    out = io.BytesIO()
    torch.save({"step": make()}, out)
    (location.directory / "common.pt").write_bytes(out.getvalue())


attacks_with(ZARR_1, "common.pt has an array {}", ARRAYS, common_array, another=("of_longer_text",))


def _forged(shape: tuple[int, ...], dtype: str, data: Any) -> Callable[[], Any]:
    made = np.zeros(1).__reduce__()
    return lambda: _Holds(made[0], made[1], (1, shape, np.dtype(dtype), False, data))


FORGED = {
    "shorter_than_its_shape": _forged((1 << 20,), "<f8", b"\0" * 8),
    "of_a_vast_shape": _forged((1 << 40, 1 << 40), "<f8", b""),
    "of_pointers": _forged((1,), "O", b"\0" * 8),
    "of_pointers_in_a_list": _forged((1,), "O", [os.system]),
    "of_negative_shape": _forged((-1,), "<f8", b"\0" * 8),
}
attacks_with(ZARR_1, "common.pt has a forged array {}", FORGED, common_array)


@attack(ZARR_1, "common.pt is no dict")
def common_is_a_number(location: Location) -> None:
    torch.save(7, location.directory / "common.pt")


@attack(ZARR_1, "an object is an array with pickles in it")
def object_is_a_pickled_array(location: Location) -> None:
    np.save(
        location.outside / "a.npy",
        np.array([_Holds(os.mkdir, (str(location.ran),))], object),
        allow_pickle=True,
    )
    location.only_file("object/*.pt").write_bytes((location.outside / "a.npy").read_bytes())
