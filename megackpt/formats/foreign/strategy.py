"""Base class of the formats of other tools: folders of files that torch.save wrote. Read only.

A subclass finds the files of a folder, and says which arrays they hold. So a new tool is one class.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megackpt.entities.describe import dtype_name
from megackpt.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotACheckpointError,
    UnsupportedError,
)
from megackpt.formats.contents import Chunks, Contents
from megackpt.formats.damage import Damage, damage_of
from megackpt.formats.file_names import FileNames
from megackpt.formats.foreign.mapped_files import file_stamp, noted_stamps
from megackpt.formats.foreign.mapped_memory import (
    MappedFiles,
    cut_files_are_errors,
    elements_at,
    in_memory,
)
from megackpt.formats.foreign.state import ForeignArray, ForeignState, check_tensor
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.formats.torch_zip import is_zip_file
from megackpt.plans.metadata import ArraySpec, ChunkTable, pad_shapes
from megackpt.plans.planning.save_plan import index_order
from megackpt.storage import LocalStore, Store, digest_of_parts

# The files of another tool as an opened checkpoint: chunks are tensors in mapped files.


def contents_of(
    state: ForeignState,
    *,
    where: str,
    check_bytes: Callable[[], None] | None,
    check_unchanged: Callable[[], None],
) -> Contents:
    """Return what the files of another tool hold as the contents of a checkpoint. Local.

    Args:
        state: the arrays and values of the files.
        where: the location of the files, for messages.
        check_bytes: compares the checksums in the files, for which all bytes are read; None if there are
            none.
        check_unchanged: raises an error if the files are not those that were read.

    Raises:
        UnsupportedError: no checkpoint can hold a part of an array.
    """
    arrays = {array.key: (number, array) for number, array in enumerate(state.arrays)}
    whole = TensorChunks([arrays[key] for key in sorted(arrays)], where=where)
    table = whole.table
    columns = (table.array, table.start, table.shape, table.flat_start, table.flat_stop)
    # Names, shapes and places alone: elements would have to be read. So `names_save` is False.
    identity = [repr(table.arrays).encode(), *(column.tobytes() for column in columns)]

    def chunks(keys: Iterable[str]) -> Chunks:
        chosen = TensorChunks([arrays[key] for key in sorted(set(keys))], where=where)
        chosen.has_checksums = check_bytes is not None
        return chosen

    return Contents(
        arrays={spec.key: spec for spec in table.arrays},
        chunks=chunks,
        common=lambda: {"state_dict": state.common, "content_metadata": state.origin},
        decode_object=_reject_object,
        identity=digest_of_parts([memoryview(data) for data in identity]),
        names_save=False,
        origin=str(state.origin["imported_from"]),
        left_out=state.left_out,
        keeps_referenced_arrays=True,
        check_bytes=check_bytes,
        check_unchanged=check_unchanged,
    )


class TensorChunks(Chunks):
    """Chunks that are tensors. Elements of another dtype than that of their array are converted.

    Args:
        numbered: the arrays, sorted by key, each with its number in the order of the files.
        where: where they are stored, for messages.
    """

    block_bytes = 16  # a multiple of the width of every dtype: a read begins with an element

    def __init__(self, numbered: Sequence[tuple[int, ForeignArray]], *, where: str) -> None:
        arrays = [array for _, array in numbered]
        owned = [(n, part) for n, array in enumerate(arrays) for part in array.parts if part.data.numel()]
        # Here, before a load plans to copy these tensors into memory.
        for n, part in owned:
            check_tensor(part.data, arrays[n].key)
        dims = max((len(array.shape) for array in arrays), default=1) or 1
        number = np.array([n for n, _ in owned], np.int64)
        itemsize = np.array([array.dtype.itemsize for array in arrays], np.int64)
        numel = np.array([part.data.numel() for _, part in owned], np.int64)
        first = np.array([part.flat_start for _, part in owned], np.int64)
        table = ChunkTable(
            tuple(ArraySpec(array.key, dtype_name(array.dtype), array.shape) for array in arrays),
            array=number,
            start=pad_shapes([part.start for _, part in owned], dims, fill=0),
            shape=pad_shapes([part.shape for _, part in owned], dims, fill=1),
            flat_start=first,
            flat_stop=first + numel,
            nbytes=numel * itemsize[number],
        )
        rows = index_order(table)
        self.table = table.take(rows)
        self._tensors = [owned[row][1].data for row in rows.tolist()]
        self._files = MappedFiles()
        self._dtypes = [array.dtype for array in arrays]
        self._where = where
        self._flat: tuple[int, Tensor] = (-1, torch.empty(0))
        # In the order in which the files name their tensors, which is that of their bytes. Not by addresses:
        # ranks divide the work by these numbers, and each rank maps the files to other addresses.
        in_files = np.array([order for order, _ in numbered], np.int64)[number][rows]
        self.position = np.argsort(np.lexsort((rows, in_files)))

    def describe(self, row: int) -> str:
        """Return where a chunk lies."""
        return f"{self.table.describe(row)} of {self._where}"

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        """Fill out with bytes of a chunk."""
        dtype = self._dtypes[int(self.table.array[row])]
        first, count = start // dtype.itemsize, len(out) // dtype.itemsize
        tensor = self._tensors[row]
        is_as_stored = tensor.dtype == dtype and not tensor.is_conj() and not tensor.is_neg()
        with cut_files_are_errors(self._where):
            if not tensor.is_contiguous():
                elements = self._flattened(row)[first : first + count]
            elif is_as_stored:
                self._files.read(tensor.data_ptr() + start, out)
                return
            else:
                elements = elements_at(tensor, first, count)
        np.frombuffer(out, np.uint8)[:] = elements.to(dtype).contiguous().view(torch.uint8).numpy()

    def _flattened(self, row: int) -> Tensor:
        """Return the elements of a chunk that is not contiguous, which is copied once."""
        kept, elements = self._flat
        if kept != row:
            elements = in_memory(self._tensors[row]).reshape(-1)
            # Another thread may put another tensor here at once, so the attribute is not read again.
            self._flat = row, elements
        return elements


def _reject_object(data: bytes, where: str) -> Any:
    raise FormatError(f"{where}: files of this tool have no objects.", path=where)


@contextmanager
def layout_errors(where: str, *, tool: str) -> Iterator[None]:
    """Raise a FormatError where a block finds other values than the files of a tool have.

    Args:
        where: names the files.
        tool: that should have written them.
    """
    try:
        yield
    except CheckpointError:  # some derive from the classes below, and have a better text
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(
            f"{where}: the files do not have the layout of {tool} ({type(error).__name__}: "
            f"{str(error)[:200]}). They are damaged, or of a version of {tool} that is not known.",
            path=where,
        ) from error


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
"""Of files of torch.save, by custom."""


class ForeignLoadStrategy(LoadStrategy):
    """Opens the files of another tool. Arrays stay in the files, which are mapped; no pickle runs code.

    Attributes:
        file_names: recognises the names of the tool's files.
    """

    version = 1
    file_names: FileNames

    @abstractmethod
    def read(self, path: str, *, checks_bytes: bool) -> ForeignState:
        """Return what the files hold.

        Args:
            path: of the folder, or of a single file.
            checks_bytes: whether to compare the checksums in the files, for which all bytes are read.

        Raises:
            NotACheckpointError, UnsupportedError, FormatError: the files cannot be read, with the reason.
        """

    def detect(self, store: Store) -> Json | None:
        """Recognise the files by their names."""
        if not any(map(self.file_names.is_foreign, names_of(store))):
            return None
        return self.manifest()

    def manifest(self) -> Json:
        """Return what stands for a metadata.json, which these tools do not write."""
        return {"sharded_backend": self.backend, "sharded_backend_version": self.version}

    def open(self, store: Store, manifest: Json, *, allow_unsafe_pickle: bool) -> Contents:
        """Map the files. Nothing that they name runs, whatever allow_unsafe_pickle is."""
        return self.open_path(local_path(store))

    def open_path(self, path: str) -> Contents:
        """Return what the files at a path hold as the contents of a checkpoint. Local."""

        def check_bytes() -> None:
            with cut_files_are_errors(path):
                self.read(path, checks_bytes=True)

        def check_unchanged() -> None:
            for file, stamp in stamps.items():
                if file_stamp(file) != stamp:
                    raise IntegrityError(
                        f"{file} changed while it was read, so what was read may be of two states. Wait "
                        f"until nothing writes there, and start again.",
                        path=file,
                    )

        with noted_stamps() as stamps, cut_files_are_errors(path):
            state = self.read(path, checks_bytes=False)
        return contents_of(
            state,
            where=path,
            check_bytes=check_bytes if _have_checksums(path) else None,
            check_unchanged=check_unchanged,
        )

    def check_files(self, store: Store, manifest: Json, *, deep: bool) -> Iterator[Damage]:
        """Yield what is wrong with the files; with deep, their checksums are compared.

        Raises:
            UnsupportedError: they are not damaged, but cannot be read.
        """
        try:
            with cut_files_are_errors(store.location):
                self.read(local_path(store), checks_bytes=deep)
        except UnsupportedError:
            raise
        except CheckpointError as error:
            yield damage_of(error, location=store.location)


def _have_checksums(path: str) -> bool:
    """Return whether files of torch.save have checksums; those of its old form, no zip files, have none."""
    paths = [path, *(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)]
    return all(is_zip_file(file) for file in paths if os.path.isfile(file) and file.endswith(SUFFIXES))


def first_gap(numbers: Collection[int]) -> int | None:
    """Return the first number from 0 on that is missing; None if all below the highest are there.

    A number may be any, such as a time, so nothing is as long as the highest one.

    >>> first_gap([1, 0, 3]), first_gap([0, 1])
    (2, None)
    """
    gap = next(number for number in range(len(numbers) + 1) if number not in numbers)
    return gap if gap < max(numbers, default=-1) else None


def names_of(store: Store) -> list[str]:
    """Return the names of the files in a folder; of a store at a single file, that of the file."""
    if isinstance(store, LocalStore) and os.path.isfile(store.location):
        return [os.path.basename(store.location)]
    return store.names()


def folder_of_latest(path: str, tracker: str, folder_of: Callable[[str], str] = str) -> str:
    """Return the folder of the step that a file names, or the path itself if it has no such file.

    Args:
        path: of a folder of steps, or of one step.
        tracker: name of the file.
        folder_of: returns the name of the folder for the text in the file.

    Raises:
        FormatError: the file names no folder in path.
    """
    file_path = os.path.join(path, tracker)
    if not os.path.isfile(file_path):
        return path
    with open(file_path, encoding="utf-8", errors="replace") as file:
        text = file.read(1000).strip()
    name = folder_of(text)
    # The text may be damaged or forged. It must not lead out of the folder.
    if not name or os.path.basename(name) != name or name in (".", ".."):
        raise FormatError(
            f"{file_path}: {text!r:.80} is not the name of a folder in {path}. Name the folder of one step.",
            path=file_path,
        )
    return os.path.join(path, name)


def local_path(store: Store) -> str:
    """Return the path of a folder or a file.

    Raises:
        NotACheckpointError: it is not on a file system, where files can be mapped.
    """
    if isinstance(store, LocalStore):
        return store.location
    raise NotACheckpointError(
        f"{store.location} is not a local directory, and files of torch.save are read from one only. Copy "
        f"the folder to a disk first.",
        path=store.location,
    )
