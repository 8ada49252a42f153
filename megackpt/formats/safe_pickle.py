"""Reads files of torch.save without running code that they name.

A pickle may name the classes of torch.load(weights_only=True), those that the user has allowed there, and a
few more harmless ones that common checkpoints contain. Formats without pickles do not need this module.
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
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, ClassVar

import torch

from megackpt.codec.kinds import is_dotted
from megackpt.codec.pickled import ForeignObject
from megackpt.codec.stand_ins import (
    ForeignMember,
    ForeignName,
    ForeignNamedTuple,
    StandInPickleError,
    keep_unknown_values,
)
from megackpt.errors import CheckpointError, FormatError, UnknownClassError, UnserializableError
from megackpt.formats.pickle_values import TIME_CLASSES, check_repeated_values
from megackpt.formats.safe_numpy import STAND_INS, UnsupportedValueError, no_bytes, plain_values, stand_ins
from megackpt.formats.torch_zip import check_archive
from megackpt.formats.unknown_classes import (
    MAX_UNKNOWN,
    PROCESS_GROUP_STATE,
    SHARDED_TENSOR,
    EnumMembers,
    ForbiddenClassError,
    StandInUnpickler,
    UnknownObject,
    is_of_optimizer,
    joined_flags,
    member_by_getattr,
    stand_in_of,
)
from megackpt.ground.notices import notice

log = logging.getLogger(__name__)

ADVICE = (
    "Nothing was run. If you trust whoever wrote the checkpoint, let it run any code: convert it with "
    "`megackpt convert --allow-unsafe-pickle`, or load it with LoadOptions(allow_unsafe_pickle=True)."
)
"""The end of the error text for a pickle of a checkpoint that is not loaded.

It is also right in functions that do not have the argument, such as those of Megatron-Core.
"""

OTHER_ADVICE = (
    "Nothing was run. If you trust whoever wrote it, load it yourself with torch.load(weights_only=False), "
    "which lets it run any code, and save it again as plain values and tensors."
)

# Prefixes of the names of numpy that make dtypes and arrays; numpy.dtypes has a class for each dtype.
_REPLACED = (*STAND_INS, "numpy.dtypes.")


class InertObject:
    """An instance of a class that is not loaded: it has the attributes and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


@cache
def inert_class(module: str, name: str) -> type[InertObject]:
    """Return a class of this name whose instances do nothing."""
    return type(name, (InertObject,), {"__module__": module})


def load_value(data: bytes | memoryview, *, where: str, allow_unsafe: bool | None = None) -> Any:
    """Return the value that `torch.save` wrote as these bytes, with tensors in host memory.

    Args:
        data: the bytes.
        where: names them in errors.
        allow_unsafe: for bytes of a checkpoint that `megackpt.load` reads: `allow_unsafe_pickle`. None for
            other bytes, which are always loaded safely: that option is not in the error text.

    Raises:
        UnknownClassError: the bytes name a class that is not known to be harmless.
        FormatError: they are damaged.
    """
    advice = OTHER_ADVICE if allow_unsafe is None else ADVICE
    try:
        if allow_unsafe:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return load_safely(data)
    except CheckpointError:
        raise
    except (UnsupportedValueError, ForbiddenClassError) as error:
        raise FormatError(f"{where}: it holds {error}, so it is not loaded. {advice}", path=where) from error
    except Exception as error:
        forbidden = _forbidden_names(data, error)
        if forbidden and not allow_unsafe:
            raise UnknownClassError(
                f"{where}: it names {forbidden}, which is not known to be harmless, so it is not loaded. "
                f"torch.serialization.add_safe_globals() allows single classes. {advice}",
                path=where,
            ) from error
        raise FormatError(
            f"{where}: torch.load() fails ({type(error).__name__}: {str(error)[:300]}). The file is damaged.",
            path=where,
        ) from error


def save_value(value: Any, *, path: str) -> bytes:
    """Return the bytes of `torch.save` for a value, after checking that `load_value` can read them.

    Raises:
        UnserializableError: it cannot, or the value cannot be pickled.
    """
    try:
        data, has_stand_ins = _pickle(value)
    except Exception as error:
        raise UnserializableError(
            f"{path}: a {type(value).__name__} cannot be pickled ({type(error).__name__}: {error}). This "
            f"format stores values as torch.save does; save something plainer.",
            path=path,
        ) from error
    try:
        # Loaded again at once: an error at the save can still be repaired, one at the load cannot.
        with keep_unknown_values() if has_stand_ins else nullcontext():
            names = check_archive(data)
            load_checked(io.BytesIO(data), names, nbytes=len(data))
    except (UnsupportedValueError, ForbiddenClassError) as error:
        raise UnserializableError(
            f"{path}: the value holds {error}. Save plain arrays, or lists, in its place.", path=path
        ) from error
    except Exception as error:
        forbidden = _forbidden_names(data, error) or str(error)[:300]
        raise UnserializableError(
            f"{path}: the value holds {forbidden}, which torch.load(weights_only=True) does not load. Save "
            f"plain values (numbers, strings, lists, dicts, tensors, numpy arrays) in its place, or allow "
            f"the class with torch.serialization.add_safe_globals() here and where it is loaded.",
            path=path,
        ) from error
    optimizers = sorted(f"{module}.{name}" for module, name in names if is_of_optimizer(module, name))
    if optimizers:
        _warn_of_classes(path, ", ".join(optimizers))
    return data


def save_known_value(value: Any) -> bytes:
    """Return the bytes of `torch.save` for a value that `save_value` has checked before."""
    return _pickle(value)[0]


def _pickle(value: Any) -> tuple[bytes, bool]:
    """Return the pickle of a value, and whether the value contains stand-ins.

    These come from a conversion, and are written as the objects that they stand for.
    """
    out = io.BytesIO()
    try:
        # First without stand-ins: the usual pickler is in C, the one for stand-ins is in Python and slow.
        torch.save(value, out)
    except StandInPickleError:
        out = io.BytesIO()
        torch.save(value, out, pickle_module=_FOREIGN)
        return out.getvalue(), True
    return out.getvalue(), False


@cache  # once in a run
def _warn_of_classes(path: str, names: str) -> None:
    notice(
        log,
        f"{path} refers to {names}. megackpt loads that; torch.load(weights_only=True), as in Megatron-Core, "
        f"only after torch.serialization.add_safe_globals([{names}]).",
    )


def warn_of_unsafe_pickle(where: str) -> None:
    """Log that a checkpoint may run code."""
    notice(
        log,
        f"{where} is opened with allow_unsafe_pickle: its pickles may run any code. Do this only with files "
        f"that you trust.",
    )


def load_safely(data: bytes | memoryview) -> Any:
    """Return what `load_value` does; errors are those of torch and of the checks."""
    return load_checked(io.BytesIO(data), check_archive(data), nbytes=len(data))


def load_checked(file: str | io.BytesIO, names: Collection[tuple[str, str]], *, nbytes: int) -> Any:
    """Load what `check_archive` has checked, and found to have these names. A file at a path is mapped."""
    with _harmless_classes(names) as substitutes, stand_ins(), _checks_of_sparse_tensors(names):
        # An unknown class may be a subclass of dict, which torch's own unpickler does not fill.
        unpickler: Any = _STAND_IN_PICKLE if _has_unknown(substitutes) else None
        value = torch.load(
            file,
            map_location="cpu",
            weights_only=unpickler is None,
            pickle_module=unpickler,
            mmap=isinstance(file, str),
        )
        value = plain_values(value, has_unknown=bool(substitutes))
    check_repeated_values(value, nbytes=nbytes)
    return value


_sparse_lock = threading.Lock()


@contextmanager
def _checks_of_sparse_tensors(names: Collection[tuple[str, str]]) -> Iterator[None]:
    """Let torch check the indices of sparse tensors: those of a damaged file could point out of bounds.

    torch 2.14 does so by itself, and warns that it takes time; it also warns of layouts that are new. Where
    warnings are errors, the file would seem to be damaged. Both settings are those of all threads, so pickles
    without sparse tensors leave them alone, and one thread at a time changes them.
    """
    if ("torch._utils", "_rebuild_sparse_tensor") not in names:
        yield
        return
    checks = torch.sparse.check_sparse_tensor_invariants()
    with _sparse_lock, warnings.catch_warnings(), checks:
        warnings.filterwarnings("ignore", message="(Validating s|S)parse ")
        yield


_Pickler: Any = pickle._Pickler  # in Python: the one in C imports each name that it writes


class _ForeignPickler(_Pickler):  # type: ignore[misc]
    """Pickles stand-ins as the objects that they stand for, whose classes need not be installed."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Pickler.dispatch)

    def save_foreign_object(self, value: ForeignObject) -> None:
        """Write the opcodes that make the object."""
        self._write_name(value.module, value.qualname)
        self.save(tuple(value.args))
        self.write(pickle.REDUCE if value.is_called else pickle.NEWOBJ)
        self.memoize(value)
        # The object is in the memo by now, so its items and state may refer to it.
        self._batch_setitems(value.items)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    def save_foreign_named_tuple(self, value: ForeignNamedTuple) -> None:
        """Write the opcodes that make the named tuple."""
        self._write_name(value.module, value.qualname)
        self.save(value.values)
        self.write(pickle.NEWOBJ)
        self.memoize(value)

    def save_foreign_name(self, value: ForeignName) -> None:
        """Write the name."""
        self._write_name(value.module, value.qualname)
        self.memoize(value)

    def save_foreign_member(self, value: ForeignMember) -> None:
        """Write the call of the class with the value or, where only its name is known, that of getattr."""
        if value.value is None and value.name is None:
            raise pickle.PicklingError(f"the value of {value!r} is not known")
        of = ForeignName(value.module, value.qualname)
        if value.value is None:
            self._write_name("builtins", "getattr")
            self.save((of, value.name))
        else:
            self.save(of)
            self.save((value.value,))
        self.write(pickle.REDUCE)
        self.memoize(value)

    def _write_name(self, module: str, name: str) -> None:
        # The name becomes two lines of the pickle. A newline in it would begin other opcodes.
        if not is_dotted(module) or not is_dotted(name):
            raise pickle.PicklingError(f"{module}.{name} is no name of a class")
        self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    dispatch[ForeignObject] = save_foreign_object
    dispatch[ForeignNamedTuple] = save_foreign_named_tuple
    dispatch[ForeignName] = save_foreign_name
    dispatch[ForeignMember] = save_foreign_member


_FOREIGN = types.SimpleNamespace(__name__=__name__, Pickler=_ForeignPickler)
_STAND_IN_PICKLE = types.SimpleNamespace(__name__=__name__, Unpickler=StandInUnpickler)


def _has_unknown(substitutes: Iterable[Any]) -> bool:
    return any(isinstance(item, type) and issubclass(item, UnknownObject) for item in substitutes)


@cache
def _harmless() -> tuple[Any, ...]:
    """Return classes, and functions by their names in pickles, that hold data and do nothing else."""
    classes = (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    paths = [(cls, f"{module}.{cls.__name__}") for cls in classes for module in ("pathlib", "pathlib._local")]
    plain: list[Any] = [argparse.Namespace, types.SimpleNamespace, io.BytesIO]
    # Not defaultdict or deque: torch's unpickler cannot fill them.
    builtin = [frozenset, slice, complex]
    return (
        *paths,
        *plain,
        *builtin,
        *TIME_CLASSES,
        (no_bytes, "builtins.bytes"),
        (member_by_getattr, "builtins.getattr"),
        (joined_flags, "_operator.or_"),
    )


# torch has one list of classes for all threads. These say what this module has changed in it.
_lock = threading.Lock()
_users = 0
_added: list[Any] = []  # put on torch's list
_removed: list[Any] = []  # taken off it, to be put back
_in_use: Counter[Any] = Counter()  # substitutes in the pickles that are being read, and by how many of them


@contextmanager
def _harmless_classes(names: Iterable[tuple[str, str]] = ()) -> Iterator[list[Any]]:
    """Allow torch to load the harmless classes for a while, in all threads: its list of classes is global.

    Yields the substitutes for those of the names that torch does not know. Classes that the user has allowed
    stay on the list, where torch.serialization.safe_globals would take them off. There are two exceptions.
    Classes of numpy are replaced by stand-ins, and are listed under names that no pickle can contain, as
    other threads must still be able to fill their instances. Enumerations are replaced by substitutes that
    serve other threads as well.
    """
    global _users
    with _lock:
        if _users == 0:
            _enter()
        _users += 1
    substitutes: list[tuple[Any, str]] = []
    try:
        with _lock:
            # Another thread may read a pickle with the same names: its substitutes stay until the last one is
            # done.
            substitutes, members = _find_substitutes(names)
            torch.serialization.add_safe_globals([item for item in substitutes if item not in _in_use])
            _in_use.update(substitutes)
        yield [*members, *(substitute for substitute, _ in substitutes)]
    finally:
        with _lock:
            _in_use.subtract(substitutes)
            unused = [item for item in substitutes if not _in_use[item]]
            _remove(unused)
            for item in unused:
                del _in_use[item]
            _users -= 1
            if _users == 0:
                _remove(_added)
                torch.serialization.add_safe_globals(_removed)


def _enter() -> None:
    """Change torch's list; the first of all users does this."""
    known = set(torch.serialization.get_safe_globals())
    of_numpy = [c for c in known if _name_of(c).startswith(_REPLACED)]
    enums = [c for c in known if _is_enum(_object_of(c))]
    _removed[:] = [*of_numpy, *enums]
    # torch knows only the opcode GLOBAL, which ends names at newlines. So no pickle can have these names.
    hidden = [(_object_of(c), f"\n{_name_of(c)}") for c in of_numpy]
    members = [(EnumMembers(_object_of(c), is_allowed=True), _name_of(c)) for c in enums]
    of_names = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    harmless = (*_harmless(), *members, *of_names, *hidden)
    _added[:] = [c for c in harmless if c not in known]
    _remove(_removed)
    torch.serialization.add_safe_globals(_added)


def _find_substitutes(names: Iterable[tuple[str, str]]) -> tuple[list[tuple[Any, str]], list[EnumMembers]]:
    """Return substitutes for names that torch does not know, and those of enumerations that it does know.

    Raises:
        ForbiddenClassError: unknown values are kept, and there are too many classes of them.
    """
    known = torch._weights_only_unpickler._get_allowed_globals()
    users = torch._weights_only_unpickler._get_user_allowed_globals()
    substitutes: list[tuple[Any, str]] = []
    members: list[EnumMembers] = []
    names = set(names)
    if SHARDED_TENSOR in names:
        names.add(PROCESS_GROUP_STATE)  # Python before 3.13 pickles a call of getattr in place of its name
    for module, name in names:
        full = f"{module}.{name}"
        # A substitute that another thread has put on torch's list does not make the class a known one.
        if full in known or (full in users and (users[full], full) not in _in_use):
            members += [users[full]] if isinstance(users.get(full), EnumMembers) else []
            continue
        stand_in = stand_in_of(module, name)
        if stand_in is not None:
            substitutes.append((stand_in, full))
    if sum(_has_unknown([substitute]) for substitute, _ in substitutes) > MAX_UNKNOWN:
        raise ForbiddenClassError(f"more than {MAX_UNKNOWN} unknown classes")
    return substitutes, members


def _remove(allowed: list[Any]) -> None:
    torch._weights_only_unpickler._remove_safe_globals(allowed)


def _is_enum(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, enum.Enum)


def _object_of(allowed: Any) -> Any:
    """Return the class or function of an item of torch's list."""
    return allowed[0] if isinstance(allowed, tuple) else allowed


def _name_of(allowed: Any) -> str:
    """Return the name in pickles of an item of torch's list."""
    return allowed[1] if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def _forbidden_names(data: bytes | memoryview, error: Exception) -> str:
    """Return the names of classes that torch does not load; "" if the error has another reason."""
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    try:
        with _harmless_classes():
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data))
    except Exception:  # noqa: BLE001 - the message of the first error has the name as well
        unsafe = []
    in_message = re.findall(r"(?:GLOBAL|class|function|type) [`'\"]?([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    return ", ".join(sorted(unsafe)) or ", ".join(dict.fromkeys(name.rstrip(".") for name in in_message))
