"""What torch.save writes, read without letting it run anything.

Owns which classes such a pickle may name: those of torch.load(weights_only=True), those that the user has
allowed there, and a few harmless ones more that common checkpoints hold. Formats that hold no pickles do not
need it.
"""

from __future__ import annotations

import argparse
import enum
import io
import logging
import pathlib
import pickle
import re
import threading
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import torch

from megackpt.codec.imported_classes import is_dotted
from megackpt.codec.stand_ins import (
    ForeignMember,
    ForeignName,
    ForeignNamedTuple,
    ForeignObject,
    StandInPickleError,
    keep_unknown_values,
)
from megackpt.errors import CheckpointError, FormatError, UnknownClassError, UnserializableError
from megackpt.formats.pickle_limits import check_archive
from megackpt.formats.safe_numpy import STAND_INS, RefusedValueError, no_bytes, plain_values, stand_ins
from megackpt.formats.unknown_classes import (
    MOST_UNKNOWN,
    CarryingUnpickler,
    Members,
    RefusedClassError,
    Unknown,
    member_by_getattr,
    stand_in_of,
)
from megackpt.notices import notice

log = logging.getLogger(__name__)

ADVICE = (
    "Nothing was run. If you trust whoever wrote the file, load with allow_unsafe_pickle=True, which lets "
    "it run any code."
)
"""What the text of a refusal ends in."""

# What makes dtypes and arrays; numpy.dtypes has a class for each dtype.
_DISPLACED = (*STAND_INS, "numpy.dtypes.")


class Inert:
    """Stands for an instance of a class that is not loaded: holds its attributes and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@cache
def inert(module: str, name: str) -> type[Inert]:
    """Return a class of this name whose instances do nothing."""
    return type(name, (Inert,), {"__module__": module})


def load_value(data: bytes | memoryview, *, where: str, allow_unsafe: bool = False) -> Any:
    """Return what `torch.save` has made these bytes of, tensors in host memory.

    Raises:
        UnknownClassError: they name a class that is not known to be harmless.
        FormatError: they are damaged.
    """
    try:
        if allow_unsafe:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return _load_safely(data)
    except CheckpointError:
        raise
    except (RefusedValueError, RefusedClassError) as error:
        raise FormatError(f"{where}: it holds {error}, so it is refused. {ADVICE}", path=where) from error
    except Exception as error:
        refused = _refused_by_torch(data, error)
        if refused and not allow_unsafe:
            raise UnknownClassError(
                f"{where}: it names {refused}, which is not known to be harmless, so it is refused. "
                f"{ADVICE} torch.serialization.add_safe_globals() allows single classes.",
                path=where,
            ) from error
        raise FormatError(
            f"{where}: torch.load() fails ({type(error).__name__}: {str(error)[:300]}). The file is damaged.",
            path=where,
        ) from error


def save_value(value: Any, *, path: str) -> bytes:
    """Return what `torch.save` makes of a value, after proving that `load_value` reads it.

    Raises:
        UnserializableError: it does not, or the value cannot be pickled.
    """
    try:
        data, holds_foreign = _pickled(value)
    except Exception as error:
        raise UnserializableError(
            f"{path}: a {type(value).__name__} cannot be pickled ({type(error).__name__}: {error}). This "
            f"format stores values as torch.save does; save something plainer.",
            path=path,
        ) from error
    try:
        with keep_unknown_values() if holds_foreign else nullcontext():
            _load_safely(data)
    except (RefusedValueError, RefusedClassError) as error:
        raise UnserializableError(
            f"{path}: the value holds {error}. Save plain arrays, or lists, in its place.", path=path
        ) from error
    except Exception as error:
        refused = _refused_by_torch(data, error) or str(error)[:300]
        raise UnserializableError(
            f"{path}: the value holds {refused}, which torch.load(weights_only=True) would refuse. Save "
            f"plain values (numbers, strings, lists, dicts, tensors, numpy arrays) in its place, or allow "
            f"the class with torch.serialization.add_safe_globals() here and where it is loaded.",
            path=path,
        ) from error
    return data


def save_known_value(value: Any) -> bytes:
    """Return what `torch.save` makes of a value of which `save_value` has proved that it can be read."""
    return _pickled(value)[0]


def _pickled(value: Any) -> tuple[bytes, bool]:
    """Return the pickle of a value, and whether stand-ins are in the value.

    These come from a conversion, and are written as what they stand for.
    """
    out = io.BytesIO()
    try:
        torch.save(value, out)
    except StandInPickleError:
        out = io.BytesIO()
        torch.save(value, out, pickle_module=_FOREIGN)
        return out.getvalue(), True
    return out.getvalue(), False


def warn_of_unsafe_pickle(where: str) -> None:
    """Log that a checkpoint may run code."""
    notice(
        log,
        f"{where} is opened with allow_unsafe_pickle: its pickles may run any code. Do this only with files "
        f"that you trust.",
    )


def _load_safely(data: bytes | memoryview) -> Any:
    named = check_archive(data)
    with _harmless_classes(named) as found, stand_ins():
        # An unknown class may be a subclass of dict, and torch's own unpickler refuses to fill those.
        unpickler: Any = _CARRYING if _has_unknown(found) else None
        value = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=unpickler is None, pickle_module=unpickler
        )
        return plain_values(value, has_unknown=bool(found))


_Pickler: Any = pickle._Pickler  # of Python itself: that in C looks up each name that it writes


class _ForeignPickler(_Pickler):  # type: ignore[misc]
    """Pickles stand-ins as what they stand for, of which only the names need be known."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def save_foreign_object(self, value: ForeignObject) -> None:
        """Write how the object is made."""
        self._write_name(value.module, value.qualname)
        self.save(tuple(value.args))
        self.write(pickle.REDUCE if value.is_called else pickle.NEWOBJ)
        self.memoize(value)
        self._batch_setitems(value.items)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def save_foreign_named_tuple(self, value: ForeignNamedTuple) -> None:
        """Write how the named tuple is made."""
        self._write_name(value.module, value.qualname)
        self.save(value.values)
        self.write(pickle.NEWOBJ)
        self.memoize(value)

    def save_foreign_name(self, value: ForeignName) -> None:
        """Write the name."""
        self._write_name(value.module, value.qualname)
        self.memoize(value)

    def save_foreign_member(self, value: ForeignMember) -> None:
        """Write the call of the class with the value."""
        if value.value is None:
            raise pickle.PicklingError(f"the value of {value!r} is not known")
        self._write_name(value.module, value.qualname)
        self.save((value.value,))
        self.write(pickle.REDUCE)
        self.memoize(value)

    def _write_name(self, module: str, name: str) -> None:
        if not is_dotted(module) or not is_dotted(name):
            raise pickle.PicklingError(f"{module}.{name} is no name of a class")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    dispatch[ForeignObject] = save_foreign_object
    dispatch[ForeignNamedTuple] = save_foreign_named_tuple
    dispatch[ForeignName] = save_foreign_name
    dispatch[ForeignMember] = save_foreign_member


_FOREIGN = types.SimpleNamespace(__name__=__name__, Pickler=_ForeignPickler)
_CARRYING = types.SimpleNamespace(__name__=__name__, Unpickler=CarryingUnpickler)


def _has_unknown(found: Iterable[Any]) -> bool:
    return any(isinstance(one, type) and issubclass(one, Unknown) for one in found)


@cache
def _harmless() -> tuple[Any, ...]:
    """Classes, and functions by the names that pickles give them, that hold data and do nothing else."""
    path = type(pathlib.Path())
    paths = [(path, f"{module}.{path.__name__}") for module in ("pathlib", "pathlib._local")]
    plain: list[Any] = [argparse.Namespace, types.SimpleNamespace, io.BytesIO]
    # Not defaultdict or deque: torch's unpickler cannot fill them.
    builtin = [frozenset, slice, complex]
    return (*paths, *plain, *builtin, (no_bytes, "builtins.bytes"), (member_by_getattr, "builtins.getattr"))


_lock = threading.Lock()
_users = 0
_added: list[Any] = []
_displaced: list[Any] = []
_of_pickles: Counter[Any] = Counter()  # what stands for names of the pickles that are being read, as often


@contextmanager
def _harmless_classes(named: Iterable[tuple[str, str]] = ()) -> Iterator[list[Any]]:
    """Let torch know the harmless classes for a while, in all threads: its list is global.

    Yields what stands for those of the names that torch does not know and that are not refused. What was on
    the list before stays on it; torch.serialization.safe_globals would take it off. Only what is of numpy and
    allowed by the user gives way to stand-ins meanwhile, under names that no pickle can hold: other threads
    must still be able to fill their instances. Enumerations give way to what serves other threads as well.
    """
    global _users
    with _lock:
        if _users == 0:
            _enter()
        _users += 1
    found: list[tuple[Any, str]] = []
    try:
        with _lock:
            found, members = _found(named)
            torch.serialization.add_safe_globals([one for one in found if one not in _of_pickles])
            _of_pickles.update(found)
        yield [*members, *(one for one, _ in found)]
    finally:
        with _lock:
            _of_pickles.subtract(found)
            over = [one for one in found if not _of_pickles[one]]
            _remove(over)
            for one in over:
                del _of_pickles[one]
            _users -= 1
            if _users == 0:
                _remove(_added)
                torch.serialization.add_safe_globals(_displaced)


def _enter() -> None:
    known = set(torch.serialization.get_safe_globals())
    of_numpy = [c for c in known if _name_of(c).startswith(_DISPLACED)]
    enums = [c for c in known if _is_enum(_object_of(c))]
    _displaced[:] = [*of_numpy, *enums]
    hidden = [(_object_of(c), f"\n{_name_of(c)}") for c in of_numpy]
    members = [(Members(_object_of(c), is_allowed=True), _name_of(c)) for c in enums]
    named = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    harmless = (*_harmless(), *members, *named, *hidden)
    _added[:] = [c for c in harmless if c not in known]
    _remove(_displaced)
    torch.serialization.add_safe_globals(_added)


def _found(named: Iterable[tuple[str, str]]) -> tuple[list[tuple[Any, str]], list[Members]]:
    """Return what stands for names that torch does not know, and enumerations that it does know.

    Raises:
        RefusedClassError: unknown classes are carried along, and there are too many.
    """
    known = torch._weights_only_unpickler._get_allowed_globals()
    users = torch._weights_only_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]
    found: list[tuple[Any, str]] = []
    members: list[Members] = []
    for module, name in named:
        full = f"{module}.{name}"
        if full in known or (full in users and (users[full], full) not in _of_pickles):
            members += [users[full]] if isinstance(users.get(full), Members) else []
            continue
        stand_in = stand_in_of(module, name)
        if stand_in is not None:
            found.append((stand_in, full))
    if sum(_has_unknown([one]) for one, _ in found) > MOST_UNKNOWN:
        raise RefusedClassError(f"more than {MOST_UNKNOWN} unknown classes")
    return found, members


def _remove(allowed: list[Any]) -> None:
    torch._weights_only_unpickler._remove_safe_globals(allowed)


def _is_enum(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, enum.Enum)


def _object_of(allowed: Any) -> Any:
    """Return a class or function of torch's list."""
    return allowed[0] if isinstance(allowed, tuple) else allowed


def _name_of(allowed: Any) -> str:
    """Return the name by which a pickle gets a class or function of torch's list."""
    return allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def _refused_by_torch(data: bytes | memoryview, error: Exception) -> str:
    """Name the classes that kept torch from loading; "" if it was something else."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    try:
        with _harmless_classes():
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - the message of the first error has the name, too
        unsafe = []
    named = re.findall(r"(?:GLOBAL|class|function|type) [`'\"]?([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    return ", ".join(sorted(unsafe)) or ", ".join(dict.fromkeys(name.rstrip(".") for name in named))
