"""Values of numpy in a pickle, made without numpy's own unpickling.

A pickle may contain arrays, scalars and dtypes of numbers, strings of fixed size and times. numpy's own
constructors trust a pickle: a forged one makes arrays of pointers, or of memory that is not the array's.
`safe_pickle` gives the unpickler the classes of this module in place of numpy's.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megackpt.codec.members import named_class
from megackpt.codec.pickled import ForeignObject, ForeignShardedTensor, named_tuple_for
from megackpt.codec.stand_ins import keeps_unknown_values
from megackpt.formats.unknown_classes import EnumMembers, PickledShardedTensor, UnknownMembers, UnknownObject

_CODE = re.compile(r"[biufcSUMm]\d{0,9}")
_MAX_NBYTES = 2**63 - 1
_MAX_DIMS = 32  # numpy 1.x
_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic")

# From values, as the modules of these functions have other names in other versions of numpy.
_real_reconstruct: Any = np.zeros(1).__reduce__()[0]
_real_scalar: Any = np.float64(0).__reduce__()[0]


class UnsupportedValueError(ValueError):
    """A pickle contains a value of numpy that is not plain data, or is forged."""


class _ThreadState(threading.local):
    """Whether this thread loads, and whether it has loaded values that `plain_values` must replace."""

    is_loading = False
    has_stand_ins = False


_thread = _ThreadState()


class StandInDtype:
    """What a pickle calls in place of numpy.dtype; value is the dtype."""

    def __new__(cls, *args: Any) -> Any:
        """Return a stand-in; or numpy's own dtype, if another user of torch's unpickler calls."""
        return object.__new__(cls) if _thread.is_loading else np.dtype(*args)

    def __init__(self, code: Any, align: Any = False, copy: Any = False) -> None:
        if type(code) is not str or not _CODE.fullmatch(code):
            raise UnsupportedValueError(
                f"a numpy array or dtype of type {str(code)[:40]!r}, and only numbers, strings of fixed "
                f"size and times are taken (no objects, no structures)"
            )
        self.value = _dtype(code)
        self._is_built = False
        _thread.has_stand_ins = True

    def __setstate__(self, state: Any) -> None:
        """Take the byte order, and the unit of a time; all else must equal what the stand-in has already."""
        fits = type(state) is tuple and len(state) in (8, 9) and not self._is_built
        if not fits or type(state[0]) is not int or state[0] not in (3, 4):
            raise UnsupportedValueError("a dtype of numpy with a malformed state")
        _, order, *structure, nbytes, alignment, flags = state[:8]
        value = self.value
        is_text = value.kind in "SU"
        # numpy pickles size and alignment of strings only.
        sizes = (value.itemsize, value.alignment) if is_text else (-1, -1)
        fits = (
            type(order) is str
            and order in ("<", ">", "|", "=")
            and structure == [None, None, None]
            and all(type(n) is int for n in (nbytes, alignment, flags))
            and (nbytes, alignment) == sizes
            and flags in (0, value.flags)
        )
        if not fits:
            raise UnsupportedValueError(f"a dtype {value.str!r} of numpy whose state belongs to another")
        if value.kind in "mM":
            value = _dtype(f"{value.kind}8{_unit(state[8] if len(state) == 9 else None)}")
        elif len(state) == 9 and state[8]:
            raise UnsupportedValueError("a dtype of numpy with metadata")
        self.value = value.newbyteorder(order) if order in "<>" else value
        self._is_built = True


class StandInArray(np.ndarray[Any, Any]):
    """What a pickle calls in place of numpy.ndarray: empty at first, and filled once."""

    def __new__(cls, *args: Any) -> Any:
        """Return an empty stand-in; or numpy's own array, if another user of torch's unpickler calls."""
        if not _thread.is_loading:
            return np.ndarray(*args)
        _thread.has_stand_ins = True
        return super().__new__(cls, (0,), np.int8)

    def __reduce__(self) -> Any:
        """Pickle as numpy's own array."""
        return np.array(self, order="K").__reduce__()

    def __setstate__(self, state: Any) -> None:
        """Take shape, dtype, order and bytes, which must fit each other."""
        # A second call would free memory that a tensor may share by then.
        if type(state) is not tuple or len(state) != 5 or vars(self).get("is_filled"):
            raise UnsupportedValueError("an array of numpy with a malformed state")
        _, shape, dtype, is_fortran, raw = state
        fits = (
            type(shape) is tuple
            and len(shape) <= _MAX_DIMS
            and all(type(n) is int and 0 <= n <= _MAX_NBYTES for n in shape)
            and type(dtype) is StandInDtype
            and type(raw) is bytes
        )
        if not fits:
            raise UnsupportedValueError("an array of numpy with a malformed state")
        value = dtype.value
        # Without the extents of 0: numpy computes strides from all others, and their product must not
        # overflow.
        extent = math.prod(n for n in shape if n) * value.itemsize
        if not 0 < extent <= _MAX_NBYTES or len(raw) != math.prod(shape) * value.itemsize:
            raise UnsupportedValueError(
                f"an array of numpy of shape {shape} and dtype {value.str} that has {len(raw)} bytes"
            )
        # All of it is checked by now, so numpy's own method may take it.
        state = (1, shape, value, bool(is_fortran), raw)
        super().__setstate__(state)
        vars(self)["is_filled"] = True


def reconstruct(subtype: Any, shape: Any, code: Any) -> Any:
    """Replace numpy's `_reconstruct`: return an array that is filled later."""
    if not _thread.is_loading:
        return _real_reconstruct(np.ndarray if subtype is StandInArray else subtype, shape, code)
    if subtype is not StandInArray:
        raise UnsupportedValueError(f"an array of numpy of class {subtype!r:.80}")
    return StandInArray()


def scalar(dtype: Any, raw: Any = None) -> Any:
    """Replace numpy's function of this name: return a scalar."""
    if not _thread.is_loading:
        return _real_scalar(dtype, raw)
    fits = type(dtype) is StandInDtype and (type(raw) is bytes or (raw is None and not dtype.value.itemsize))
    if not fits or len(raw or b"") != dtype.value.itemsize:
        raise UnsupportedValueError("a scalar of numpy whose bytes do not fit its dtype")
    # The dtype may be a string of width 0, which `frombuffer` rejects.
    if not raw:
        return dtype.value.type()
    return np.frombuffer(raw, dtype.value)[0]


def no_bytes() -> bytes:
    """Replace the class bytes, which pickles call for empty bytes only."""
    return b""


STAND_INS: dict[str, Any] = {
    "numpy.dtype": StandInDtype,
    "numpy.ndarray": StandInArray,
    **{f"numpy.{core}.multiarray._reconstruct": reconstruct for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
}
"""The substitutes for names of numpy in a pickle."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Make `STAND_INS` return stand-ins in this thread; in other threads they return numpy's own objects."""
    before = _thread.is_loading, _thread.has_stand_ins
    _thread.is_loading, _thread.has_stand_ins = True, False
    try:
        yield
    finally:
        _thread.is_loading, _thread.has_stand_ins = before


def plain_values(value: Any, *, has_unknown: bool) -> Any:
    """Return a loaded value with numpy's own arrays and dtypes in it, and stand-ins for unknown classes.

    Called inside `stand_ins`. has_unknown says whether there may be unknown classes.
    """
    return _StandInReplacer().replaced(value) if _thread.has_stand_ins or has_unknown else value


class _StandInReplacer:
    """Replaces stand-ins in a value, the same one everywhere. Containers are changed in place."""

    def __init__(self) -> None:
        # By id: the value, kept alive so that no other value gets its id, and its replacement.
        self._done: dict[int, tuple[Any, Any]] = {}

    def replaced(self, value: Any) -> Any:
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # for cycles
            self._done[id(value)] = value, self._replaced(value)
        return self._done[id(value)][1]

    def _replaced(self, value: Any) -> Any:
        kind = type(value)
        if kind is StandInDtype:
            return value.value
        if kind is StandInArray:
            return np.array(value, order="K")
        if isinstance(value, UnknownObject):
            return self._foreign(value)
        if kind is PickledShardedTensor:
            sharded = ForeignShardedTensor(None)
            self._done[id(value)] = value, sharded  # it may contain itself
            sharded.state = self.replaced(vars(value).get("pickled_state"))
            return sharded
        if isinstance(value, type) and issubclass(value, UnknownObject):
            return named_class(value.of.module, value.of.qualname)
        if kind is EnumMembers:
            of = value.cls
            return of if value.is_allowed else named_class(of.__module__, of.__qualname__)
        if kind is UnknownMembers:
            return value.of
        if kind in (tuple, frozenset):
            items = [self.replaced(item) for item in value]
            # A tuple without stand-ins stays the same object, for all that refer to it.
            return value if _are_same(items, value) else kind(items)
        if kind is list:
            value[:] = [self.replaced(item) for item in value]
        elif kind is set:
            items = [self.replaced(item) for item in value]
            if not _are_same(items, value):
                value.clear()
                value.update(items)
        elif kind in (dict, OrderedDict, Counter):
            self._replace_items(value)
        if isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type):
            self._replace_items(vars(value))
        return value

    def _foreign(self, value: UnknownObject) -> ForeignObject | tuple[Any, ...]:
        parts = vars(value)
        foreign = ForeignObject(value.of.module, value.of.qualname, (), parts["is_called"])
        self._done[id(value)] = value, foreign  # it may contain itself
        foreign.args = self.replaced(parts["args"])
        foreign.state = self.replaced(parts["state"])
        foreign.items = self.replaced(parts["items"])
        named_tuple = named_tuple_for(foreign) if value.is_named_tuple else None
        if value.is_named_tuple and named_tuple is None and not keeps_unknown_values():
            raise UnsupportedValueError(
                f"a named tuple {foreign.module}.{foreign.qualname} that does not fit its class"
            )
        return foreign if named_tuple is None else named_tuple

    def _replace_items(self, table: dict[Any, Any]) -> None:
        pairs = [(self.replaced(key), self.replaced(item)) for key, item in table.items()]
        if _are_same([key for key, _ in pairs], table):
            for key, item in pairs:
                table[key] = item
        else:
            table.clear()
            dict.update(table, pairs)  # not Counter's, which adds


def _are_same(items: list[Any], before: Any) -> bool:
    return all(a is b for a, b in zip(items, before, strict=True))


def _dtype(code: str) -> np.dtype[Any]:
    try:
        value = np.dtype(code)
    except TypeError as error:
        raise UnsupportedValueError(f"a dtype {code!r} of numpy that this version of it lacks") from error
    return value


def _unit(metadata: Any) -> str:
    """Return the unit of a time as it is written in the name of a dtype.

    Source: numpy's pickles of datetime64: (dict of metadata, (unit, count, 1, 1)).
    """
    fits = type(metadata) is tuple and len(metadata) == 2 and not metadata[0] and type(metadata[1]) is tuple
    fields: tuple[Any, ...] = metadata[1] if fits else ()
    if len(fields) != 4 or type(fields[0]) is not bytes or any(type(n) is not int for n in fields[1:]):
        raise UnsupportedValueError("a time of numpy without a unit")
    unit, count = fields[0].decode("ascii", "replace"), fields[1]
    if unit not in _UNITS or not 0 < count < 2**31 or fields[2:] != (1, 1):
        raise UnsupportedValueError("a time of numpy with a malformed unit")
    return "" if unit == "generic" else f"[{count}{unit}]"
