"""Limits on the values in a pickle: keys that collide, and values that are contained several times."""

from __future__ import annotations

import argparse
import datetime
import io
import pickle
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

from megackpt.codec.containers import check_collisions
from megackpt.codec.members import imported_named_tuple
from megackpt.codec.pickled import ForeignObject, ForeignShardedTensor
from megackpt.formats.safe_numpy import STAND_INS, StandInDtype, no_bytes, stand_ins

# Checks the keys of dicts and the elements of sets in a pickle before an unpickler inserts them.
#
# `pickle_limits` asks for this check where a pickle has many keys that are no strings: to insert keys that
# were chosen to collide takes time that grows with the square of their number.

_Unpickler: Any = pickle._Unpickler  # in Python: the one in C has no methods for opcodes


def check_keys(data: bytes) -> None:
    """Reject a pickle with a dict or a set whose keys collide more often than chance allows.

    No class that the pickle names is looked up. Tensors and other objects are left out.

    Raises:
        pickle.UnpicklingError: keys collide, or the pickle is damaged.
    """
    # Texts of Python 2 may have any encoding. As bytes, they have salted hashes as well.
    reader = _KeyReader(io.BytesIO(data), encoding="bytes")
    try:
        with stand_ins():
            reader.load()
        # Only now: a pickle can add to a table until its end.
        for table in reader.tables:
            check_collisions(table.keys)
    except pickle.UnpicklingError:
        raise
    except ValueError as error:
        raise pickle.UnpicklingError(str(error)) from error
    except Exception as error:
        # A damaged pickle can raise any error, as it does in an unpickler.
        raise pickle.UnpicklingError(f"damaged ({type(error).__name__}: {error})") from error


def name_in_python_3(module: str, name: str) -> tuple[str, str]:
    """Return a module and name of a pickle of protocol 2, which has those of Python 2, in Python 3."""
    if (module, name) in NAME_MAPPING:
        return NAME_MAPPING[module, name]
    return IMPORT_MAPPING.get(module, module), name


class _Table:
    """Stands for a dict or a set: its keys, in their order."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def add(self, keys: Sequence[Any]) -> None:
        for key in keys:
            hash(key)  # an error if it has none; an unpickler raises the same one
        self.keys += keys


class _Opaque:
    """Stands for an object whose hash cannot be chosen, or that has none."""


class _Name:
    """Stands for a class or a function."""

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class _KeyReader(_Unpickler):  # type: ignore[misc]
    """Unpickles numbers, texts, tuples and lists as they are, and stand-ins for all else."""

    # A copy, as the table of the base class is that of all unpicklers in the process.
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tables: list[_Table] = []

    def find_class(self, module: str, name: str) -> _Name:
        """Return a stand-in for the name."""
        return _Name(*name_in_python_3(module, name))

    def persistent_load(self, _: Any) -> _Opaque:
        """Return a stand-in for a storage."""
        return _Opaque()

    def load_table(self) -> None:
        """EMPTY_DICT, EMPTY_SET."""
        self.append(self._table(()))

    def load_dict(self) -> None:
        """DICT: keys and values since the last mark."""
        pairs = self.pop_mark()  # it sets self.append
        self.append(self._table(pairs[::2]))

    def load_setitem(self) -> None:
        """SETITEM."""
        self.stack.pop()
        key = self.stack.pop()
        self._add([key])

    def load_setitems(self) -> None:
        """SETITEMS: keys and values since the last mark."""
        self._add(self.pop_mark()[::2])

    def load_additems(self) -> None:
        """ADDITEMS: elements of a set since the last mark."""
        self._add(self.pop_mark())

    def load_frozenset(self) -> None:
        """FROZENSET: elements since the last mark."""
        elements = self.pop_mark()  # it sets self.append
        self.append(self._frozenset(elements))

    def load_build(self) -> None:
        """BUILD: a dtype of numpy has a state, and decides what the bytes of a scalar mean."""
        state = self.stack.pop()
        if type(self.stack[-1]) is StandInDtype:
            self.stack[-1].__setstate__(state)

    def load_reduce(self) -> None:
        """REDUCE, NEWOBJ."""
        args = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], args)

    def load_newobj_ex(self) -> None:
        """NEWOBJ_EX."""
        self.stack.pop()
        self.load_reduce()

    def _called(self, function: Any, args: Any) -> Any:
        """Return what a call makes, or a stand-in for it."""
        name = (function.module, function.name) if isinstance(function, _Name) else None
        if type(args) is not tuple or name is None:
            return _Opaque()
        if name in _TABLES:
            return self._table(_keys_of(args[-1], pairs=name in _OF_PAIRS) if args else ())
        if name == ("builtins", "frozenset"):
            return self._frozenset(_keys_of(args[-1], pairs=False) if args else ())
        if name == ("torch", "Size"):
            return tuple(_keys_of(args[0], pairs=False)) if args else ()
        # A named tuple has the hash of a plain tuple, which a file can choose.
        if imported_named_tuple(*name) is not None:
            return args
        make = _MADE.get(".".join(name))
        return _Opaque() if make is None else make(*args)

    def _table(self, keys: Sequence[Any]) -> _Table:
        table = _Table()
        table.add(keys)
        self.tables.append(table)
        return table

    def _frozenset(self, keys: Sequence[Any]) -> frozenset[Any]:
        check_collisions(self._table(keys).keys)  # as the set is made here already
        return frozenset(keys)

    def _add(self, keys: Sequence[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, _Table):
            target.add(keys)

    for _code, _load in {
        pickle.EMPTY_DICT: load_table, pickle.EMPTY_SET: load_table, pickle.DICT: load_dict,
        pickle.SETITEM: load_setitem, pickle.SETITEMS: load_setitems, pickle.ADDITEMS: load_additems,
        pickle.FROZENSET: load_frozenset, pickle.BUILD: load_build, pickle.REDUCE: load_reduce,
        pickle.NEWOBJ: load_reduce, pickle.NEWOBJ_EX: load_newobj_ex,
    }.items():  # fmt: skip
        dispatch[_code[0]] = _load


_OF_PAIRS = {("builtins", "dict"), ("collections", "OrderedDict"), ("collections", "defaultdict")}
_TABLES = {*_OF_PAIRS, ("builtins", "set"), ("collections", "Counter")}
TABLE_CLASSES = {*_TABLES, ("builtins", "frozenset")}
"""Modules and names of the classes that insert keys when they are called."""


def _keys_of(values: Any, *, pairs: bool) -> Sequence[Any]:
    """Return the keys that a class of tables takes from its last argument."""
    if isinstance(values, _Table):
        return values.keys
    if isinstance(values, frozenset):
        return list(values)
    if type(values) not in (list, tuple):
        return ()
    return [pair[0] for pair in values] if pairs else values


def _encoded(text: Any, encoding: Any = None) -> bytes:
    """Return the bytes that a pickle of protocol 2 writes as a text."""
    return text.encode("latin1") if type(text) is str and encoding in ("latin1", b"latin1") else b""


TIME_CLASSES = (datetime.timedelta, datetime.date, datetime.time, datetime.datetime, datetime.timezone)
"""Classes of the standard library whose instances are made of numbers, and have their hashes."""

# Calls that make numbers, tuples, or bytes for them. A slice has the hash of a tuple.
_MADE: dict[str, Any] = {
    "builtins.complex": complex,
    "builtins.slice": lambda *args: args,
    "builtins.bytes": no_bytes,
    **{f"datetime.{cls.__name__}": cls for cls in TIME_CLASSES},
    "_codecs.encode": _encoded,
    **{name: STAND_INS[name] for name in STAND_INS if name.endswith((".dtype", ".scalar"))},
}


# Limits how large a value of a pickle is that contains other values several times.
#
# A pickle can refer to one list from many places. If each of n lists contains the next one twice, the value
# has 2**n elements for everything that walks through it, in a few bytes of pickle.

_SEQUENCES = (list, tuple, set, frozenset)
_FOREIGN = (ForeignObject, ForeignShardedTensor)
_CONTAINERS = (*_SEQUENCES, dict, argparse.Namespace, types.SimpleNamespace, *_FOREIGN)


_PER_BYTE = 32  # elements of a value for a byte of its pickle: a reference to a small container takes two
_ALWAYS = 2**18  # elements that the smallest pickle may have


def check_repeated_values(value: Any, *, nbytes: int) -> None:
    """Check that a value from a pickle of so many bytes has elements in proportion.

    Each element counts as often as a walk through the value meets it, but each container is visited once. A
    reference to a container that it is inside of counts as one element: a walk has to end there.

    Raises:
        ValueError: the value has more elements.
    """
    counts: dict[int, int] = {}
    stack: list[tuple[Any, list[Any] | None]] = [(value, None)]
    while stack:
        container, items = stack.pop()
        if items is not None:
            # All containers in it have been counted, but those that it is inside of.
            counts[id(container)] = 1 + sum(counts.get(id(item), 1) for item in items)
            if counts[id(container)] > _PER_BYTE * nbytes + _ALWAYS:
                raise ValueError("values are repeated in each other without measure")
        elif isinstance(container, _CONTAINERS) and id(container) not in counts:
            counts[id(container)] = 1
            # It comes off the stack twice: now, and after all that is in it, to be added up.
            items = list(_items_of(container))
            stack.append((container, items))
            stack += [(item, None) for item in items]


def _items_of(container: Any) -> Iterable[Any]:
    """Return what a container contains, without code of its class."""
    if isinstance(container, dict):
        return (*dict.keys(container), *dict.values(container))
    if isinstance(container, ForeignObject):
        return (*container.args, container.state, *(part for pair in container.items for part in pair))
    if isinstance(container, ForeignShardedTensor):
        return (container.state,)
    if isinstance(container, argparse.Namespace | types.SimpleNamespace):
        return vars(container).values()
    base: Any = next(cls for cls in _SEQUENCES if isinstance(container, cls))
    items: Iterable[Any] = base.__iter__(container)
    return items
