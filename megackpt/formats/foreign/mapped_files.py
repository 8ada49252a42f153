"""Reads long files of torch.save, of other tools, without running code that they name.

Tensors are mapped, and objects of unknown classes become stand-ins. `safe_pickle` reads values in memory.
"""

from __future__ import annotations

import pathlib
from importlib import import_module
from typing import Any

from megackpt.codec.stand_ins import keep_unknown_values
from megackpt.errors import FormatError, UnknownClassError
from megackpt.formats.safe_numpy import UnsupportedValueError
from megackpt.formats.safe_pickle import OTHER_ADVICE, load_checked, load_safely
from megackpt.formats.torch_zip import check_archive_file, is_zip_file
from megackpt.formats.unknown_classes import ForbiddenClassError


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
        FormatError: it is damaged, or not one of torch.save.
    """
    if not pathlib.Path(path).is_file():  # to open a pipe would wait for ever
        raise FormatError(f"{path} is missing, or is no regular file.", path=path)
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
