"""Reads long files of torch.save, of other tools, without running code that they name.

Tensors are mapped, and objects of unknown classes become stand-ins. `safe_pickle` reads values in memory.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch

from megackpt.codec.pickled import ForeignObject
from megackpt.codec.stand_ins import keep_unknown_values
from megackpt.entities.recognition import is_dtensor
from megackpt.errors import FormatError, UnknownClassError
from megackpt.formats.contents import MAX_REPEATED_BYTES
from megackpt.formats.safe_numpy import UnsupportedValueError
from megackpt.formats.safe_pickle import OTHER_ADVICE, load_checked, load_safely
from megackpt.formats.torch_zip import check_archive_file, is_zip_file, tensor_records
from megackpt.formats.unknown_classes import ForbiddenClassError

Stamp: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of a file, which show whether it has changed; None if it is gone."""

_NOTED: ContextVar[dict[str, Stamp] | None] = ContextVar("stamps of the files that are read", default=None)


@dataclass(slots=True)
class _Repeated:
    """Bytes of expanded tensors beyond those that the files have, of all files so far."""

    nbytes: int = 0


_REPEATED: ContextVar[_Repeated | None] = ContextVar("what the files that are read repeat", default=None)

_MAX_DEPTH = 200
_IN_TUPLE = 1_000_000  # added to the depth of what a tuple or set contains
_MAX_COPIES = 64
"""How often the bytes of a file may be in it on average: weights that are tied, or shared by all layers."""


def load_mapped_file(path: str, *, checks_bytes: bool = True) -> Any:
    """Return the value in a file of torch.save; its tensors are parts of the file, which is mapped.

    So a file may be longer than memory. As `load_value`, this runs nothing that the file names. Objects of
    unknown classes become stand-ins (`ForeignObject`), which say what the file has of them, and so do
    ShardedTensors (`ForeignShardedTensor`). A file of an old version of torch, which is not a zip file, is
    read into memory.

    Args:
        path: of the file.
        checks_bytes: whether to compare the checksums in the file, for which all of it is read.

    Raises:
        UnknownClassError: the file names a module that runs programs, such as os.
        FormatError: it is damaged, or not one of torch.save; or its tensors repeat a few bytes over many.
    """
    if not pathlib.Path(path).is_file():  # to open a pipe would wait for ever
        raise FormatError(f"{path} is missing, or is no regular file.", path=path)
    noted = _NOTED.get()
    if noted is not None:
        noted[path] = file_stamp(path)  # before it is read
    value = _load_file(path, checks_bytes=checks_bytes)
    before = _REPEATED.get()
    repeated = _check_repeats(value, path, before.nbytes if before is not None else 0)
    if before is not None:
        before.nbytes = repeated
    return value


@contextmanager
def noted_stamps() -> Iterator[dict[str, Stamp]]:
    """Note the stamp of each file that the block loads, by path, and bound what they repeat together.

    For this thread only.
    """
    noted: dict[str, Stamp] = {}
    token, repeated = _NOTED.set(noted), _REPEATED.set(_Repeated())
    try:
        yield noted
    finally:
        _NOTED.reset(token)
        _REPEATED.reset(repeated)


def file_stamp(path: str) -> Stamp:
    """Return the stamp of a file as it is now."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def record_checksums(path: str) -> list[tuple[str, int, int]]:
    """Return name, size and checksum of each tensor's record in a file, as its directory has them.

    A file of an old version of torch has no checksums; of it, the size is returned.

    Raises:
        FormatError: the file is missing, or damaged.
    """
    if not pathlib.Path(path).is_file():
        raise FormatError(f"{path} is missing, or is no regular file.", path=path)
    return tensor_records(path) if is_zip_file(path) else [("", pathlib.Path(path).stat().st_size, 0)]


def _check_repeats(value: Any, path: str, repeated: int) -> int:
    """Reject a file whose tensors repeat their elements over much more memory than they have in the file.

    With strides of 0, a few bytes are a tensor of any size, which takes memory as soon as it is copied.
    Return the bytes that are repeated in this file and before it.
    """
    total, most = 0, _MAX_COPIES * (os.stat(path).st_size + MAX_REPEATED_BYTES // _MAX_COPIES)
    in_memory: set[int] = set()  # storages of tensors in tuples and sets, which common state has by value
    # Every place counts: a tensor that is in many is copied for each. `pickle_limits` bounds their number.
    todo: list[tuple[str, Any, int]] = [("", value, 0)]
    while todo:
        key, part, depth = todo.pop()
        if depth % _IN_TUPLE > _MAX_DEPTH:  # it may contain itself; whoever reads it rejects it
            continue
        if isinstance(part, torch.Tensor):
            nbytes, stored = _sizes(part)
            total += nbytes
            storage = part.untyped_storage().data_ptr() if stored else 0
            repeated += nbytes if storage in in_memory else max(nbytes - stored, 0)
            if depth >= _IN_TUPLE:
                in_memory.add(storage)
            if repeated > MAX_REPEATED_BYTES or total > most:
                raise FormatError(
                    f"{path}: {key[1:]!r:.200} repeats {stored:,} bytes over {nbytes:,}, perhaps not alone: "
                    f"it is an expanded tensor, or the file is damaged. Save tensor.contiguous().",
                    key=key[1:],
                    path=path,
                )
        elif isinstance(part, dict):
            todo.extend((f"{key}.{name}", member, depth + 1) for name, member in part.items())
        elif isinstance(part, (list, tuple, set, frozenset)):
            deeper = depth + 1 + (_IN_TUPLE if type(part) is not list and depth < _IN_TUPLE else 0)
            todo.extend((f"{key}.{number}", member, deeper) for number, member in enumerate(part))
        elif isinstance(part, ForeignObject):
            todo.append((key, part.state, depth + 1))
    return repeated


def _sizes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of a tensor's elements, and those that the file has of it; 0 if it has no strides."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or is_dtensor(tensor):
        return 0, 0
    return tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes()


def _load_file(path: str, *, checks_bytes: bool) -> Any:
    try:
        with keep_unknown_values():
            if not is_zip_file(path):
                return load_safely(pathlib.Path(path).read_bytes())
            names = check_archive_file(path, checks_bytes=checks_bytes)
            if any(module.startswith("torch.distributed.tensor") for module, _ in names):
                import_module("torch.distributed.tensor")  # puts DTensor on torch's list of classes
            return load_checked(path, names, nbytes=pathlib.Path(path).stat().st_size)
    except (UnsupportedValueError, ForbiddenClassError) as error:
        raise FormatError(
            f"{path}: it holds {error}, so it is not loaded. {OTHER_ADVICE}", path=path
        ) from error
    except Exception as error:
        if "GLOBAL" in str(error):  # torch's own list of modules that no file may name
            raise UnknownClassError(
                f"{path}: it names what may do harm, so it is not loaded ({str(error)[:300]}). "
                f"{OTHER_ADVICE}",
                path=path,
            ) from error
        raise FormatError(
            f"{path}: it is damaged, or not a file of torch.save ({type(error).__name__}: "
            f"{str(error)[:300]}). Copy it again from where it was saved.",
            path=path,
        ) from error
