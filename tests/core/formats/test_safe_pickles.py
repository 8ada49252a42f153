"""Values and tensors in pickles come back bit by bit, and nothing of a pickle runs or changes the process.

What an older Python pickles in another way than this one is read all the same.
"""

from __future__ import annotations

import argparse
import collections
import enum
import io
import pathlib
import pickle
import signal
import sys
import typing
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata
from torch.distributed.checkpoint import metadata

from megackpt import FormatError
from megackpt.codec import ForeignMember, keep_unknown_values
from megackpt.contrib.transformer_engine.extra_state import _format_name
from megackpt.errors import UnserializableError
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value, save_value
from megackpt.formats.tensor_pickle import load_tensor_pickle
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from tests.support.states import PickledCall, torch_saved
from tests.system.attacks.opcodes import binary, call, named, pickled, text, zipped

RANDOM = np.random.default_rng(0)
ARRAYS = [
    *(
        np.frombuffer(RANDOM.bytes(48 * np.dtype(code).itemsize), code).reshape(4, 12)
        for code in ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
    ),
    np.array([True, False]),
    np.array(["a", "bc", ""]),
    np.array([b"a", b"bc\x00d"]),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.array(3.5),
    np.zeros((0, 3), np.float32),
    np.arange(2.0).reshape(2, *[1] * 31),  # as many dims as numpy 1 takes
    np.array(["2020-01-01", "NaT"], "M8[s]"),
    np.array([1, 2], "m8[25us]"),
    np.array([-(2**63)]).view("M8"),  # NaT without a unit, which numpy 2.5 warns of in other ways
    np.arange(3, dtype=np.longdouble) / 3,
]


def as_numpy_1(data: bytes) -> bytes:
    """The same file with the names that numpy 1.x gives its functions."""
    value = torch.PyTorchFileReader(io.BytesIO(data)).get_record("data.pkl")
    return archive(value.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))


def archive(pickled: bytes) -> bytes:
    """What torch.save writes around a pickle."""
    out = io.BytesIO()
    writer = torch.PyTorchFileWriter(out)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_end_of_file()
    return out.getvalue()


def check_array(actual: Any, expected: np.ndarray[Any, Any]) -> None:
    assert type(actual) is np.ndarray
    assert (actual.dtype, actual.dtype.str) == (expected.dtype, expected.dtype.str)
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()
    assert actual.flags.f_contiguous == expected.copy("A").flags.f_contiguous
    assert actual.flags.writeable
    assert actual.flags.owndata


@pytest.mark.parametrize("change", [bytes, as_numpy_1], ids=["numpy 2", "numpy 1"])
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype.str}{a.shape}")
def test_arrays_scalars_and_dtypes_come_back_bit_by_bit(array: np.ndarray[Any, Any], change: Any) -> None:
    scalar = array.reshape(-1)[-1] if array.size else np.float32(1)
    expected = pickle.loads(pickle.dumps(array, 2))  # numpy makes native arrays of swapped ones
    data = change(torch_saved((array, array, scalar, array.dtype)))
    loaded, again, number, dtype = load_value(data, where="here")
    check_array(loaded, expected)
    assert again is loaded
    assert (type(number), number.dtype) == (type(scalar), scalar.dtype)
    assert number.tobytes() == scalar.tobytes()
    assert (dtype, dtype.str) == (array.dtype, array.dtype.str)


def test_arrays_are_found_wherever_a_value_can_hold_them() -> None:
    array, dtype = np.arange(3), np.dtype("<f4")
    container = argparse.Namespace(inner=[{"deep": (array, {dtype})}])
    cycle: list[Any] = [array]
    cycle.append(cycle)
    value = {
        dtype: 1,
        "order": collections.OrderedDict(b=array, a=dtype),
        "count": collections.Counter({dtype: 2}),
        "frozen": frozenset([dtype, 1]),
        "container": container,
        "cycle": cycle,
        "scalar": np.str_("text"),
        "empty": np.str_(""),
        "bytes": b"",
    }
    loaded = load_value(torch_saved(value), where="here")
    assert list(loaded) == list(value)
    assert loaded[dtype] == 1
    assert list(loaded["order"]) == ["b", "a"]
    assert loaded["order"]["a"] == dtype
    assert loaded["count"] == value["count"]
    assert loaded["frozen"] == value["frozen"]
    deep, types = loaded["container"].inner[0]["deep"]
    check_array(deep, array)
    assert types == {dtype}
    assert deep is loaded["order"]["b"] is loaded["cycle"][0]
    assert loaded["cycle"][1] is loaded["cycle"]
    assert loaded["bytes"] == b""
    assert (loaded["scalar"], loaded["empty"]) == ("text", "")
    assert type(loaded["empty"]) is np.str_


def array_of(shape: Any, dtype: Any, raw: Any) -> PickledCall:
    function, arguments, _ = np.zeros(1).__reduce__()
    return PickledCall(function, *arguments, state=(1, shape, dtype, False, raw))


def struct_of_pointers() -> PickledCall:
    object_field = PickledCall(np.dtype, "O8", False, True)
    state = (3, "|", None, ("f",), {"f": (object_field, 0)}, 8, 1, 0)
    return array_of((1,), PickledCall(np.dtype, "V8", False, True, state=state), b"A" * 8)


def text_of(nbytes: int) -> PickledCall:
    return PickledCall(np.dtype, "S8", False, True, state=(3, "|", None, None, None, nbytes, 1, 0))


F8 = np.dtype("<f8")
MULTIARRAY = np.float64(0).__reduce__()[0]
FORGED: dict[str, Any] = {
    "a struct of pointers": struct_of_pointers(),
    "objects": np.array([None, []], object),
    "a dtype of objects": np.dtype(object),
    "a struct": np.zeros(2, [("a", "f4")]),
    "a text dtype that grows": array_of((1,), text_of(1 << 16), b"x" * 8),
    "too few bytes": array_of((4,), F8, b"x" * 8),
    "too many bytes": array_of((1,), F8, b"x" * 16),
    "a negative extent": array_of((-1, -1), F8, b"x" * 8),
    "extents that overflow": array_of((2**61, 8, 0), F8, b""),
    "a list for a shape": array_of([1], F8, b"x" * 8),
    "text for bytes": array_of((1,), F8, "x" * 8),
    "a scalar of too few bytes": PickledCall(MULTIARRAY, F8, b"x"),
    "a scalar that is none": PickledCall(MULTIARRAY, np.dtype("V8"), b"x" * 8),
    "a class of dtypes": PickledCall(type(F8)),
    "a class of arrays": np.ma.masked_array([1]),
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
def test_anything_but_plain_values_raises_an_error(value: Any) -> None:
    with pytest.raises(FormatError, match="the file"):
        load_value(torch_saved(value), where="the file")


@pytest.mark.parametrize("name", ["too few bytes", "too many bytes", "extents that overflow"])
def test_an_array_that_does_not_fit_its_bytes_is_rejected_before_numpy_makes_it(name: str) -> None:
    nbytes = len(FORGED[name].call[2][4])
    with pytest.raises(FormatError, match=f"an array of numpy of shape .* that has {nbytes} bytes"):
        load_value(torch_saved(FORGED[name]), where="the file")


def test_the_constructor_of_arrays_makes_an_empty_one_whatever_it_is_asked_for() -> None:
    check_array(load_value(torch_saved(PickledCall(np.ndarray, (64,), F8)), where="it"), np.zeros(0, np.int8))


def test_a_dtype_that_changes_after_it_was_used_raises_an_error() -> None:
    state = b"(K\x03X\x01\x00\x00\x00|NNNJ\x00\x00\x01\x00K\x01K\x00t"
    array = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x01\x85"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00S8\x89\x88\x87Rq\x01"
    pickled = b"\x80\x02]" + array + dtype + b"\x87Ra" + b"h\x01" + state + b"ba."
    with pytest.raises(FormatError, match="state belongs to another"):
        load_value(archive(pickled), where="the file")


def test_an_array_that_is_filled_twice_raises_an_error() -> None:
    function, arguments, state = np.zeros(2).__reduce__()
    once = torch.PyTorchFileReader(io.BytesIO(torch_saved(PickledCall(function, *arguments, state=state))))
    pickled = once.get_record("data.pkl")
    assert pickled[-2:] == b"b."
    assert pickled[-4:-3] == b"q"
    with pytest.raises(FormatError, match="malformed state"):
        load_value(archive(pickled[:-1] + b"h" + pickled[-3:-2] + b"b."), where="the file")


def test_objects_raise_an_error_that_names_them_at_save_already() -> None:
    value = np.array([None, []], object)
    with pytest.raises(FormatError, match=r"no objects, no structures.*Nothing was run"):
        load_value(torch_saved({"a": value}), where="the file")
    with pytest.raises(UnserializableError, match="no objects, no structures"):
        save_value({"a": value}, path="args")


def test_what_a_user_has_allowed_of_numpy_stays_allowed_and_is_not_used_for_a_checkpoint() -> None:
    allowed = [np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], type(F8)]
    torch.serialization.add_safe_globals(allowed)
    before = set(torch.serialization.get_safe_globals())
    try:
        with pytest.raises(FormatError):
            load_value(torch_saved(struct_of_pointers()), where="the file")
        check_array(load_value(torch_saved(np.arange(3.0)), where="the file"), np.arange(3.0))
        assert set(torch.serialization.get_safe_globals()) == before >= set(allowed)
        loaded = torch.load(io.BytesIO(torch_saved(np.arange(3.0))), weights_only=True)
        check_array(loaded, np.arange(3.0))
    finally:
        torch._weights_only_unpickler._remove_safe_globals(allowed)


def test_another_thread_of_torch_load_gets_what_its_user_has_allowed_meanwhile() -> None:
    from megackpt.formats import safe_pickle

    allowed = [np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], type(F8)]
    torch.serialization.add_safe_globals(allowed)
    try:
        with safe_pickle._harmless_classes():  # as while a checkpoint is being loaded elsewhere
            loaded = torch.load(io.BytesIO(torch_saved(np.arange(3.0))), weights_only=True)
        check_array(loaded, np.arange(3.0))
    finally:
        torch._weights_only_unpickler._remove_safe_globals(allowed)


WHOLE = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


def sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that some layouts are new
        return WHOLE.to_sparse(layout=layout, **({} if layout not in BLOCKS else {"blocksize": (1, 1)}))


BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, *BLOCKS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_tensor_in_a_value_survives_where_warnings_are_errors(layout: torch.layout) -> None:
    data = save_value({"mask": sparse(layout)}, path="o")
    filters, checks = list(warnings.filters), torch.sparse.check_sparse_tensor_invariants.is_enabled()
    loaded: Any = load_value(data, where="w")["mask"]
    assert loaded.layout == layout
    assert torch.equal(loaded.to_dense(), WHOLE)
    assert warnings.filters == filters
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled() == checks


def test_a_sparse_tensor_whose_indices_point_out_of_bounds_raises_an_error() -> None:
    indices, values = torch.tensor([[9], [0]]), torch.ones(1)
    tensor = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=False)
    with pytest.raises(FormatError, match=r"w: torch\.load\(\) fails \(RuntimeError: .*The file is damaged"):
        load_value(torch_saved(tensor), where="w")
    with pytest.raises(UnserializableError, match=r"o: the value holds size is inconsistent with indices"):
        save_value(tensor, path="o")


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2

    def __setstate__(self, state: Any) -> None:
        self._value_ = 99


class Pair(typing.NamedTuple):
    first: int


class Plain:
    pass


def _of_torch(data: bytes) -> Any:
    return load_value(zipped(data), where="w")


def _of_old_torch(data: bytes) -> Any:
    numbers = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    head = b"".join(pickle.dumps(number, protocol=2) for number in numbers)
    return load_value(head + data + pickle.dumps([], protocol=2), where="w")


def _carried(data: bytes) -> Any:
    with keep_unknown_values():
        return load_value(zipped(data), where="w")


def _of_dcp(data: bytes) -> Any:
    return load_metadata(data, where="w")


def _of_tensors(data: bytes) -> Any:
    return load_tensor_pickle(data, [(HERE, "Plain")], where="w")


READERS: list[Callable[[bytes], Any]] = [_of_torch, _of_old_torch, _carried, _of_dcp, _of_tensors]
HERE = __name__
ONE = b"K\x01"
_META = "torch.distributed.checkpoint.metadata"

# Opcodes that leave something on the stack that the pickle has not made.
TARGETS = {
    "class": named("collections", "OrderedDict"),
    "class_of_paths": named("pathlib", "PurePosixPath"),
    "class_of_posix_paths": named("pathlib", "PosixPath"),
    "class_of_dcp": named(_META, "BytesStorageMetadata"),
    "class_of_users": named(HERE, "Plain"),
    "class_of_named_tuples": named(HERE, "Pair"),
    "enumeration": named("signal", "Signals"),
    "enumeration_of_users": named(HERE, "Shade"),
    "enumeration_of_dcp": named(_META, "_MEM_FORMAT_ENCODING"),
    "member": call(named("signal", "Signals"), b"K\x0f"),
    "member_by_name": named("signal", "SIGTERM"),
    "member_by_getattr": call(named("builtins", "getattr"), named("signal", "Signals"), "SIGTERM"),
    "member_of_users": call(named(HERE, "Shade"), ONE),
    "member_by_new": named(HERE, "Shade") + ONE + b"\x85\x81",
    "member_of_dcp": call(named(_META, "_MEM_FORMAT_ENCODING"), b"K\x00"),
    "function": named("torch._utils", "_rebuild_tensor_v2"),
    "function_of_dcp": named("torch.serialization", "_get_layout"),
    "function_of_megackpt": named("megackpt.formats.safe_numpy", "scalar"),
    "module": named("torch", "nn"),
    "module_by_path": named("torch", "_utils"),
    "dtype": named("torch", "float32"),
    "layout": call(named("torch.serialization", "_get_layout"), "torch.strided"),
    "by_the_memo": named("pathlib", "PurePosixPath") + b"q\x00" + b"0" + b"h\x00",
    "twice": named("pathlib", "PurePosixPath") + b"2",
    "in_a_list": b"]" + named("signal", "SIGTERM") + b"a",
    "behind_a_popped_mark": named("pathlib", "PurePosixPath") + b"(0",
}
_STATE = {
    "dict": b"}" + text("_value_") + b"K\x09s",
    "slots": b"N}" + text("__str__") + named("torch", "Size") + b"s\x86",
}
_ARGUMENTS = b"(K\x01t"


def _state_of_process() -> dict[str, dict[str, int]]:
    """Return the identity of everything in the modules that the attacks name, and in their classes."""
    torch.serialization._get_layout("torch.strided")  # it fills a table of its own at its first call
    modules = [
        "argparse", "builtins", "collections", "enum", "functools", "io", "pathlib", "signal", "torch",
        "torch._utils", "torch.serialization", _META, "torch.distributed.checkpoint.planner", "types", HERE,
        "megackpt.formats.safe_numpy", "megackpt.formats.safe_pickle", "megackpt.formats.unknown_classes",
    ]  # fmt: skip
    changes: dict[str, dict[str, int]] = {}
    for module in modules:
        names = vars(sys.modules[module])
        changes[module] = {name: id(value) for name, value in names.items()}
        for name, value in names.items():
            if isinstance(value, type):
                changes[f"{module}.{name}"] = {key: id(item) for key, item in vars(value).items()}
            elif isinstance(value, enum.Enum) or callable(value):
                changes[f"{module}.{name}"] = dict.fromkeys(map(repr, vars_of(value).items()), 0)
    members = [*signal.Signals, *Shade, *dcp_metadata._MEM_FORMAT_ENCODING]
    changes["members"] = {repr(member): hash(repr(vars(member))) for member in members}
    return changes


def vars_of(value: object) -> dict[str, Any]:
    own = getattr(value, "__dict__", {})
    # The parameters of tests are left out: the text of a storage is a warning.
    return {name: item for name, item in own.items() if name != "pytestmark"} if isinstance(own, dict) else {}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_a_pickle_gets_by_a_name_cannot_be_changed(reader: Callable[[bytes], Any]) -> None:
    before = _state_of_process()
    allowed = [Shade, Plain, signal.Signals]
    for users in ([], allowed):
        torch.serialization.add_safe_globals(users)
        try:
            for name, target in TARGETS.items():
                for kind, state in _STATE.items():
                    with pytest.raises(FormatError):
                        pytest.fail(f"BUILD {kind} of {name} gave {reader(pickled(target, state, b'b'))!r}")
        finally:
            torch._weights_only_unpickler._remove_safe_globals(users)
    assert _state_of_process() == before
    assert signal.SIGTERM.value == 15


def test_what_the_bytes_of_a_storage_give_cannot_be_changed() -> None:
    """The bytes of a storage are a file of their own, which may name what other files may."""
    before = _state_of_process()
    for name, target in TARGETS.items():
        storage = call(named("torch.storage", "_load_from_bytes"), binary(zipped(pickled(target))))
        for kind, state in _STATE.items():
            with pytest.raises(FormatError):
                pytest.fail(f"BUILD {kind} of {name} gave {_of_tensors(pickled(storage, state, b'b'))!r}")
    assert _state_of_process() == before


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_function_of_torch_that_sets_attributes_changes_no_member(reader: Callable[[bytes], Any]) -> None:
    before = _state_of_process()
    rebuild = named("torch._tensor", "_rebuild_from_type_v2")  # makes an object, then sets its attributes
    for cls, value in ((named("signal", "Signals"), b"K\x0f"), (named(HERE, "Shade"), ONE)):
        for state in _STATE.values():
            with pytest.raises(FormatError):
                reader(pickled(call(rebuild, cls, cls, value + b"\x85", state)))
    assert _state_of_process() == before


# What can be called and made: its class does nothing but hold what it is given.
_CAN_BE_CALLED = ("class", "enumeration", "by_the_memo", "twice", "behind", "function")


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("make", [b"R", b"\x81"], ids=["REDUCE", "NEWOBJ"])
def test_members_modules_and_values_cannot_be_called(reader: Callable[[bytes], Any], make: bytes) -> None:
    before = _state_of_process()
    for name, target in TARGETS.items():
        if name.startswith(_CAN_BE_CALLED) or (reader is _carried and name.startswith("module")):
            continue  # a name of a module is that of an unknown class, where those are carried along
        with pytest.raises(FormatError):
            pytest.fail(f"{make!r} of {name} gave {reader(pickled(target, _ARGUMENTS, make))!r}")
    for name, target in TARGETS.items():
        is_unknown = reader is _carried and name == "function_of_megackpt"
        if name.startswith(("enumeration", "function")) and make == b"\x81" and not is_unknown:
            with pytest.raises(FormatError):
                pytest.fail(f"NEWOBJ of {name} gave {reader(pickled(target, _ARGUMENTS, make))!r}")
    assert _state_of_process() == before


def test_what_a_pickle_has_made_can_be_given_attributes() -> None:
    ordered = named("collections", "OrderedDict") + b")R"
    actual = _of_torch(pickled(ordered, text("a") + b"K\x01s", b"}" + text("_metadata") + b"K\x02s", b"b"))
    assert actual == {"a": 1}
    assert vars(actual) == {"_metadata": 2}
    made = named(_META, "MetadataIndex") + b")\x81"
    state = b"}" + text("fqn") + text("w") + b"s" + text("offset") + b"Ns" + text("index") + b"Ns"
    assert _of_dcp(pickled(made, state, b"b")) == dcp_metadata.MetadataIndex("w")


def test_the_stack_is_followed_as_an_unpickler_does() -> None:
    # POP takes a mark away where one is on top: what is below it is the target, not what is made afterwards.
    path = named("pathlib", "PurePosixPath")
    data = pickled(path, b"(", b"0", b"N}" + text("__str__") + ONE + b"s\x86", b"b")
    with pytest.raises(pickle.UnpicklingError, match="has not made"):
        check_opcodes(data)
    assert pathlib.PurePosixPath("a").__str__() == "a"


def test_a_member_that_is_in_a_state_ten_thousand_times_is_written_once() -> None:
    member = ForeignMember("someones_library", "Mode", None, 1)
    with keep_unknown_values():
        single, many = (save_value([member] * count, path="w") for count in (1, 10_000))
        loaded = load_value(many, where="w")
    assert len(many) - len(single) < 5 * 10_000  # a member alone has some forty bytes
    assert [(member.qualname, member.args) for member in loaded] == [("Mode", (1,))] * 10_000


@pytest.mark.parametrize("name", [b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"])
def test_an_array_of_an_allowed_class_that_is_no_array_is_an_error(name: bytes) -> None:
    arguments = name + b"K\x00\x85U\x01b\x87"  # (class, (0,), "b")
    pickled = b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n" + arguments + b"R."
    with pytest.raises(FormatError, match="an array of numpy of class"):
        load_value(archive(pickled), where="the file")


BASE = torch.arange(12.0).view(3, 4)
STORAGE = torch.arange(6, dtype=torch.int16)._typed_storage()  # type: ignore[no-untyped-call]


def rebuilt(*arguments: Any) -> PickledCall:
    """Return what is pickled as a tensor with these arguments."""
    return PickledCall(torch._utils._rebuild_tensor_v2, *arguments, False, OrderedDict())


@pytest.mark.parametrize(
    "tensor",
    {
        "whole": BASE,
        "turned": BASE.t(),
        "a part": BASE[1:, 1:3],
        "the last element": BASE[2, 3],
        "every other column": BASE[:, ::2],
        "repeated": BASE[0].expand(5, 4),
        "empty": BASE[3:],
        "bf16": BASE.bfloat16(),
        "bool": BASE > 3,
    }.values(),
)
def test_a_tensor_of_torch_loads_bit_for_bit(tensor: torch.Tensor) -> None:
    loaded = load_tensor_pickle(pickle.dumps({"t": [tensor]}), [], where="w")["t"][0]
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(loaded, tensor)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((STORAGE, 0, (7,), (1,)), "beyond its storage"),
        ((STORAGE, 1, (6,), (1,)), "beyond its storage"),
        ((STORAGE, 0, (2, 3), (4, 1)), "beyond its storage"),
        ((STORAGE, 6, (), ()), "beyond its storage"),
        ((STORAGE, -1, (2,), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (-2,), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (2,), (-1,)), "negative or missing extent"),
        ((STORAGE, 0, (2, 3), (1,)), "negative or missing extent"),
        ((STORAGE, 0, (2.0,), (1,)), "negative or missing extent"),
        ((BASE, 0, (2,), (1,)), "a tensor in a Tensor"),
        ((b"", 0, (2,), (1,)), "a tensor in a bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_its_storage_is_an_error(args: tuple[Any, ...], why: str) -> None:
    with pytest.raises(FormatError, match=rf"^w: the pickle cannot be loaded .*{why}"):
        load_tensor_pickle(pickle.dumps(rebuilt(*args)), [], where="w")


@pytest.mark.parametrize("extent", [(6,), (2, 3)])
def test_a_tensor_may_end_where_its_storage_does(extent: tuple[int, ...]) -> None:
    stride = (1,) if len(extent) == 1 else (3, 1)
    loaded = load_tensor_pickle(pickle.dumps(rebuilt(STORAGE, 0, extent, stride)), [], where="w")
    assert torch.equal(loaded, torch.arange(6, dtype=torch.int16).view(extent))
    beyond = load_tensor_pickle(pickle.dumps(rebuilt(STORAGE, 6, (0, 3), (3, 1))), [], where="w")
    assert beyond.shape == (0, 3)


# Python 3.11.0 to 3.11.3 pickles a member of an enumeration as a call of getattr.


def test_members_of_enumerations_are_read_from_a_call_of_getattr() -> None:
    kinds = metadata._MEM_FORMAT_ENCODING
    stored = pickle.dumps([PickledCall(getattr, kinds, "TORCH_PRESERVE_FORMAT")])
    assert load_metadata(stored, where="w") == [kinds.TORCH_PRESERVE_FORMAT]


@pytest.mark.parametrize(
    "args", [(metadata.Metadata, "__init__"), (metadata._MEM_FORMAT_ENCODING, "__class__"), ([], "append")]
)
def test_a_call_of_getattr_gives_nothing_else(args: tuple[Any, str]) -> None:
    with pytest.raises(FormatError):
        load_metadata(pickle.dumps([PickledCall(getattr, *args)]), where="w")


class Format(enum.Enum):
    """Stands for the one of Transformer Engine."""

    HYBRID = (448, 57344)


OF_FORMAT = (__name__, "Format")


@pytest.mark.parametrize(
    "stored", [Format.HYBRID, PickledCall(getattr, Format, "HYBRID")], ids=["by value", "by name"]
)
def test_a_format_of_transformer_engine_has_its_name_either_way(stored: Any) -> None:
    (member,) = load_tensor_pickle(pickle.dumps([stored]), [OF_FORMAT], where="w")
    assert (member.of, _format_name(member)) == (OF_FORMAT, "HYBRID")


@pytest.mark.parametrize("args", [([], "append"), ({}, "update"), ("text", "format")])
def test_a_call_of_getattr_in_a_pickle_of_tensors_gives_nothing_else(args: tuple[Any, str]) -> None:
    with pytest.raises(FormatError, match="getattr for something that is no class"):
        load_tensor_pickle(pickle.dumps([PickledCall(getattr, *args)]), [OF_FORMAT], where="w")
