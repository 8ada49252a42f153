"""Reads pickles of plain values and tensors, written by `pickle.dumps`, without running code that they name.

`safe_pickle` reads files of `torch.save`. In a plain pickle, a tensor is a call that rebuilds it from a
storage, whose bytes are those of `torch.save`.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import torch

from megackpt.errors import CheckpointError, FormatError, UnknownClassError
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value

Name = tuple[str, str]  # a module, and the name of a class or function in it


class PickledInstance:
    """Stands for an object of a class that is not loaded. It has the arguments and the state in the pickle.

    Attributes:
        of: the module and name of the class or function.
        args: what it was called with.
        state: its attributes.
    """

    of: Name = ("", "")
    args: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *args: Any) -> PickledInstance:
        """Keep the arguments."""
        instance = object.__new__(cls)
        vars(instance).update(args=args, state={})
        return instance

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state if isinstance(state, dict) else {}


def load_tensor_pickle(data: bytes, classes: Collection[Name], *, where: str) -> Any:
    """Return the value of a pickle of plain values, tensors, and instances of some classes.

    Args:
        data: bytes of `pickle.dumps`.
        classes: the names that the pickle may have in addition. Their objects become `PickledInstance`s.
            Nothing of that name is imported or called.
        where: for errors: the file and key.

    Raises:
        UnknownClassError: the pickle has another name. Nothing of it was run.
        FormatError: it is damaged, or would change what it has not made.
    """
    try:
        # Before the unpickler: that one allocates what a pickle asks for.
        check_opcodes(data)
        return _Unpickler(data, classes, where).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise FormatError(
            f"{where}: the pickle cannot be loaded ({type(error).__name__}: {str(error)[:300]}). It is "
            f"damaged.",
            path=where,
        ) from error


class _Unpickler(pickle.Unpickler):
    """Knows the functions of this module and no others."""

    def __init__(self, data: bytes, classes: Collection[Name], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = classes
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """Return the substitute for a name."""
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if (module, name) in self._classes:
            return _class_for((module, name))
        raise UnknownClassError(
            f"{self._where}: the pickle names {module}.{name}, which is not known to be harmless. Nothing of "
            f"it was run. Only load it with its own library, and only if you trust whoever wrote it.",
            path=self._where,
        )

    def persistent_load(self, number: Any) -> Any:
        """Reject objects that are stored outside of the pickle."""
        raise pickle.UnpicklingError("it refers to objects outside of it")


@lru_cache(maxsize=64)
def _class_for(name: Name) -> type[PickledInstance]:
    return type("Pickled", (PickledInstance,), {"of": name})


def _storage(data: Any) -> torch.TypedStorage:
    """Replace `torch.storage._load_from_bytes`, which would load any pickle.

    Another value than a storage may be one that the process has already, such as a member of an enumeration.
    The pickle could change its attributes, as `check_opcodes` counts the result of a call as new.
    """
    if not isinstance(data, bytes):
        raise pickle.UnpicklingError("a storage that is not bytes")
    storage = load_value(data, where="a tensor's storage")
    if not isinstance(storage, torch.TypedStorage):
        raise pickle.UnpicklingError(f"a storage that is a {type(storage).__name__}")
    return storage


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Replace `torch._utils._rebuild_tensor_v2`: no hooks, nothing outside of the storage."""
    if not isinstance(storage, torch.TypedStorage):
        raise pickle.UnpicklingError(f"a tensor in a {type(storage).__name__}")
    numbers = (offset, *size, *stride)
    if not all(type(n) is int and n >= 0 for n in numbers) or len(size) != len(stride):
        raise pickle.UnpicklingError("a tensor with a negative or missing extent")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * storage.dtype.itemsize > storage._untyped_storage.nbytes():
        # set_ would make the storage longer.
        raise pickle.UnpicklingError("a tensor beyond its storage")
    return torch.empty(0, dtype=storage.dtype).set_(storage._untyped_storage, offset, size, stride)


def _member(of: Any, name: Any) -> PickledInstance:
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickles the members of an enumeration."""
    if not (isinstance(of, type) and issubclass(of, PickledInstance)) or type(name) is not str:
        raise pickle.UnpicklingError("a call of getattr for something that is no class")
    return of(name)


_FUNCTIONS: dict[Name, Any] = {
    ("builtins", "getattr"): _member,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}
