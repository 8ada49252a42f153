"""Unpickling `.metadata` without letting it run any code.

It may name plain data classes of torch.distributed.checkpoint, and of Megatron-Core, which need not be
installed: its classes are replaced by inert ones. The other pickles of a checkpoint are those of torch.save,
which `formats.safe_pickle` reads.
"""

from __future__ import annotations

import collections
import enum
import io
import pathlib
import pickle
from typing import Any

import torch
import torch.distributed._shard.sharded_tensor.metadata as sharded_tensor_metadata
import torch.distributed.checkpoint.filesystem as dcp_filesystem
import torch.distributed.checkpoint.metadata as dcp_metadata
import torch.distributed.checkpoint.planner as dcp_planner

from megackpt.codec.containers import check_collisions
from megackpt.errors import FormatError
from megackpt.formats.documents import damaged
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.pickle_values import check_keys
from megackpt.formats.safe_pickle import ADVICE, inert_class
from megackpt.formats.unknown_classes import EnumMembers, member_by_getattr

_OF_TORCH: dict[Any, tuple[str, ...]] = {
    dcp_metadata: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    dcp_filesystem: ("_StorageInfo", "_StoragePrefix"),
    dcp_planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    # The module of the tensor properties until torch 2.1.
    sharded_tensor_metadata: ("TensorProperties", "MEM_FORMAT_ENCODING"),
}  # fmt: skip

_OF_MEGATRON = {
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "megatron.core.dist_checkpointing.strategies.resharding": ("TensorReformulationMetadata",),
}


def _size(extents: Any = ()) -> torch.Size:
    return torch.Size(extents)


def _ordered_dict() -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict()


def _default_dict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(factory)


# These only hold their arguments, and take no more memory than the pickle. The functions take what Python's
# own pickles give the classes: no items to insert, and no NEWOBJ of a class whose hashes can be chosen.
_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): _size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "slice"): slice,
    # Python 3.11.0 to 3.11.3 pickles a call of it for a member of an enumeration.
    ("builtins", "getattr"): member_by_getattr,
    ("builtins", "dict"): dict,
    ("builtins", "list"): list,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "PurePosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib", "PureWindowsPath"): pathlib.PureWindowsPath,
}


_BUILTINS = (b"builtins", rb"\u", rb"\U")
"""One of these is in every pickle that names set, frozenset, slice, dict or list: a name may have escapes."""


class _ForbiddenClassError(pickle.UnpicklingError):
    pass


def _hashed_by_identity(cls: type, made: list[Any]) -> type:
    """Return a subclass whose instances have hashes that a file cannot choose, and are listed in `made`."""

    def new(kind: type, *_: Any) -> Any:
        made.append(object.__new__(kind))
        return made[-1]

    own = {"__new__": new, "__eq__": object.__eq__, "__hash__": object.__hash__}
    return type(cls.__name__, (cls,), own)


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, *, allow_unsafe: bool) -> None:
        super().__init__(io.BytesIO(data))
        self._allow_unsafe = allow_unsafe
        self._made: list[Any] = []  # instances of subclasses that are replaced at the end

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the format, or an inert one; any other is an error."""
        for known, names in _OF_TORCH.items():
            if module == known.__name__ and name in names and hasattr(known, name):
                value = getattr(known, name)
                # Of an enumeration only its members: a pickle could set attributes of the class.
                if issubclass(value, enum.Enum):
                    return EnumMembers(value, is_allowed=True)
                is_key = value.__hash__ is not None and not self._allow_unsafe
                return _hashed_by_identity(value, self._made) if is_key else value
        if name in _OF_MEGATRON.get(module, ()):
            return inert_class(module, name)
        # Python 3.13 has the classes of paths in `pathlib._local`.
        plain = _PLAIN.get((module.removesuffix("._local"), name))
        if plain is not None:
            return plain
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if self._allow_unsafe:
            return super().find_class(module, name)
        raise _ForbiddenClassError(f"{module}.{name}")

    def load(self) -> Any:
        """Return the object; its classes are those of the format.

        Raises:
            ValueError: keys of `storage_data` collide more often than chance allows.
        """
        metadata = super().load()
        # All keys are inserted by now, so their own classes, and with them their own hashes, may come back.
        for instance in self._made:
            object.__setattr__(instance, "__class__", type(instance).__base__)
        stored = getattr(metadata, "storage_data", None)
        if self._made and type(stored) is dict:
            # The dict was filled with other hashes, so a look-up would fail. It is made anew, once a check
            # has shown that the true hashes are harmless.
            check_collisions(list(stored))
            metadata.storage_data = dict(stored.items())
        return metadata


def load_metadata(data: bytes, *, where: str, allow_unsafe: bool = False) -> Any:
    """Unpickle a `.metadata`. Its attributes are not checked.

    Raises:
        FormatError: it names a class that is not part of the format, or it is not a pickle.
    """
    try:
        check_opcodes(data, calls_make_new=allow_unsafe)
        # Of the classes that are allowed, only those of builtins insert keys when they are called.
        if any(mark in data for mark in _BUILTINS):
            check_keys(data)
        return _MetadataUnpickler(data, allow_unsafe=allow_unsafe).load()
    except _ForbiddenClassError as error:
        raise FormatError(
            f"{where}: it names {error}, which is no part of the format, so it is not loaded. {ADVICE}",
            path=where,
        ) from error
    except Exception as error:
        # A damaged pickle can raise any error, in whatever class it happens to build.
        raise damaged(f"cannot be unpickled ({type(error).__name__}: {error})", where) from error
