"""Values of numpy in pickles: plain ones come back bit by bit, forged ones are errors and are never made."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import FormatError, UnserializableError
from megackpt.formats.safe_pickle import load_value, save_value

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
    np.array(["2020-01-01", "NaT"], "M8[s]"),
    np.array([1, 2], "m8[25us]"),
    np.array([-(2**63)]).view("M8"),  # NaT without a unit, which numpy 2.5 warns of in other ways
    np.arange(3, dtype=np.longdouble) / 3,
]


def written(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


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
    assert actual.dtype == expected.dtype
    assert actual.dtype.str == expected.dtype.str
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
    loaded, again, number, dtype = load_value(
        change(written((array, array, scalar, array.dtype))), where="here"
    )
    check_array(loaded, expected)
    assert again is loaded
    assert type(number) is type(scalar)
    assert number.tobytes() == scalar.tobytes()
    assert number.dtype == scalar.dtype
    assert dtype == array.dtype
    assert dtype.str == array.dtype.str


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
    loaded = load_value(written(value), where="here")
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


class Reduced:
    """Is pickled as whatever it is given."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def array_of(shape: Any, dtype: Any, raw: Any) -> Reduced:
    function, arguments, _ = np.zeros(1).__reduce__()
    return Reduced(function, arguments, (1, shape, dtype, False, raw))


def struct_of_pointers() -> Reduced:
    object_field = Reduced(np.dtype, ("O8", False, True))
    state = (3, "|", None, ("f",), {"f": (object_field, 0)}, 8, 1, 0)
    return array_of((1,), Reduced(np.dtype, ("V8", False, True), state), b"A" * 8)


def text_of(nbytes: int) -> Reduced:
    return Reduced(np.dtype, ("S8", False, True), (3, "|", None, None, None, nbytes, 1, 0))


F8 = np.dtype("<f8")
MULTIARRAY = np.float64(0).__reduce__()[0]
FORGED = {
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
    "a scalar of too few bytes": Reduced(MULTIARRAY, (F8, b"x")),
    "a scalar that is none": Reduced(MULTIARRAY, (np.dtype("V8"), b"x" * 8)),
    "a class of dtypes": Reduced(type(F8), ()),
    "a class of arrays": np.ma.masked_array([1]),
}


@pytest.mark.parametrize("value", FORGED.values(), ids=FORGED)
def test_anything_but_plain_values_raises_an_error(value: Any) -> None:
    with pytest.raises(FormatError, match="the file"):
        load_value(written(value), where="the file")


def test_the_constructor_of_arrays_makes_an_empty_one_whatever_it_is_asked_for() -> None:
    check_array(load_value(written(Reduced(np.ndarray, ((64,), F8))), where="it"), np.zeros(0, np.int8))


def test_a_dtype_that_changes_after_it_was_used_raises_an_error() -> None:
    state = b"(K\x03X\x01\x00\x00\x00|NNNJ\x00\x00\x01\x00K\x01K\x00t"
    array = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x01\x85"
    dtype = b"cnumpy\ndtype\nX\x02\x00\x00\x00S8\x89\x88\x87Rq\x01"
    pickled = b"\x80\x02]" + array + dtype + b"\x87Ra" + b"h\x01" + state + b"ba."
    with pytest.raises(FormatError, match="state belongs to another"):
        load_value(archive(pickled), where="the file")


def test_an_array_that_is_filled_twice_raises_an_error() -> None:
    function, arguments, state = np.zeros(2).__reduce__()
    once = torch.PyTorchFileReader(io.BytesIO(written(Reduced(function, arguments, state))))
    pickled = once.get_record("data.pkl")
    assert pickled[-2:] == b"b."
    assert pickled[-4:-3] == b"q"
    with pytest.raises(FormatError, match="malformed state"):
        load_value(archive(pickled[:-1] + b"h" + pickled[-3:-2] + b"b."), where="the file")


def test_objects_raise_an_error_that_names_them_at_save_already() -> None:
    value = np.array([None, []], object)
    with pytest.raises(FormatError, match=r"no objects, no structures.*Nothing was run"):
        load_value(written({"a": value}), where="the file")
    with pytest.raises(UnserializableError, match="no objects, no structures"):
        save_value({"a": value}, path="args")


def test_what_a_user_has_allowed_of_numpy_stays_allowed_and_is_not_used_for_a_checkpoint() -> None:
    allowed = [np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], type(F8)]
    torch.serialization.add_safe_globals(allowed)
    before = set(torch.serialization.get_safe_globals())
    try:
        with pytest.raises(FormatError):
            load_value(written(struct_of_pointers()), where="the file")
        check_array(load_value(written(np.arange(3.0)), where="the file"), np.arange(3.0))
        assert set(torch.serialization.get_safe_globals()) == before >= set(allowed)
        loaded = torch.load(io.BytesIO(written(np.arange(3.0))), weights_only=True)
        check_array(loaded, np.arange(3.0))
    finally:
        torch._weights_only_unpickler._remove_safe_globals(allowed)


def test_another_thread_of_torch_load_gets_what_its_user_has_allowed_meanwhile() -> None:
    from megackpt.formats import safe_pickle

    allowed = [np.ndarray, np.dtype, np.zeros(1).__reduce__()[0], type(F8)]
    torch.serialization.add_safe_globals(allowed)
    try:
        with safe_pickle._harmless_classes():  # as while a checkpoint is being loaded elsewhere
            loaded = torch.load(io.BytesIO(written(np.arange(3.0))), weights_only=True)
        check_array(loaded, np.arange(3.0))
    finally:
        torch._weights_only_unpickler._remove_safe_globals(allowed)


def test_a_forged_common_state_does_not_crash_the_reader(tmp_path: Path) -> None:
    """In a process of its own, since it would die of it."""
    (tmp_path / "forged").write_bytes(written({"x": struct_of_pointers()}))
    program = (
        "import sys; from megackpt import FormatError; from megackpt.formats.safe_pickle import load_value\n"
        "try: print(repr(load_value(open(sys.argv[1], 'rb').read(), where='it')['x']['f'][0])[:9])\n"
        "except FormatError as error: print('rejected', error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "forged")], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout[:8]) == (0, "rejected"), ran.stderr
