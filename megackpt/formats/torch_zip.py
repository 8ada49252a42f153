"""Checks the zip file that torch.save writes, and the pickle in it, before either is loaded."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import BinaryIO

from megackpt.errors import FormatError
from megackpt.formats.pickle_limits import check_opcodes, check_pickle

_ZIP = b"PK\3\4"
_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError)
_OLD_PICKLES = 5  # of a file that is no zip file: magic number, version, system, value, names of storages


def check_archive(data: bytes | memoryview) -> set[tuple[str, str]]:
    """Return the modules and names in a file of torch.save, after checking the zip records.

    torch.save never writes records that are compressed or listed twice, or share bytes, so these are errors.
    A file that is not a zip file, as old versions of torch wrote, is a sequence of pickles, and storages.

    Raises:
        pickle.UnpicklingError: the file has such records, or a pickle that `check_opcodes` rejects.
    """
    named: set[tuple[str, str]] = set()
    if bytes(data[:4]) != _ZIP:
        data, position = bytes(data), 0
        for _ in range(_OLD_PICKLES):
            names, position = check_pickle(data, position, calls_make_new=True)
            named |= names
        return named
    return _check_zip(io.BytesIO(data), nbytes=len(data), checks_bytes=False)


def check_archive_file(path: str, *, checks_bytes: bool) -> set[tuple[str, str]]:
    """Return the modules and names in a file of torch.save that is a zip file, as `check_archive` does.

    The file is read in parts; only its pickle is in memory.

    Args:
        path: of the file.
        checks_bytes: whether to compare the checksum of each record, which torch.load does not.

    Raises:
        pickle.UnpicklingError: see `check_archive`; or a checksum differs.
    """
    with open(path, "rb") as file:
        return _check_zip(file, nbytes=os.fstat(file.fileno()).st_size, checks_bytes=checks_bytes)


def tensor_records(path: str) -> list[tuple[str, int, int]]:
    """Return name, size and checksum of each tensor's record in a zip file of torch.save, sorted.

    Raises:
        FormatError: it is no whole zip file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(record.filename.partition("/")[2], record) for record in archive.infolist()]
    except _ZIP_ERRORS as error:
        raise FormatError(
            f"{path}: no whole zip file ({error}). Copy it again from where it was saved.", path=path
        ) from error
    return sorted((name, r.file_size, r.CRC) for name, r in records if name.startswith("data/"))


def changed_record(data: bytes) -> str | None:
    """Return what is wrong with the checksums in a file of torch.save; None if nothing is, or it has none."""
    if not data.startswith(_ZIP):
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            bad = archive.testzip()
    except _ZIP_ERRORS as error:
        return f"it is no whole zip file ({error})"
    return None if bad is None else f"its record {bad!r} has another checksum than it was saved with"


def is_zip_file(path: str) -> bool:
    """Return whether a file begins as those of torch.save do."""
    with open(path, "rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def _check_zip(file: BinaryIO, *, nbytes: int, checks_bytes: bool) -> set[tuple[str, str]]:
    named: set[tuple[str, str]] = set()
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if any(r.compress_type != zipfile.ZIP_STORED or r.compress_size != r.file_size for r in records):
                raise pickle.UnpicklingError("a record of the zip file is compressed")
            # Records that share bytes expand a short file to any size, without compression.
            if sum(record.file_size for record in records) > nbytes:
                raise pickle.UnpicklingError("records of the zip file lie on each other, or outside of it")
            # Of two records with one name, torch may load the other one than zipfile checks. It looks for
            # names without regard to case.
            if len({record.filename.lower() for record in records}) < len(records):
                raise pickle.UnpicklingError("a record of the zip file stands twice in it")
            for record in records:
                # torch takes the folder of the first record, so the pickles of all folders are checked.
                if record.filename.lower().endswith("/data.pkl"):
                    named |= check_opcodes(archive.read(record))
            if checks_bytes and (damaged := archive.testzip()) is not None:
                raise pickle.UnpicklingError(f"the bytes of its record {damaged} are not those written")
    except _ZIP_ERRORS as error:
        raise pickle.UnpicklingError(f"no whole zip file ({error})") from error
    return named
