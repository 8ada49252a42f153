"""Errors of the Megatron-Core face: those that are also DCP's, and names that megackpt does not support."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from megackpt.errors import CheckpointError, MismatchError, MissingKeyError, UnsupportedError

# Errors of a load that are also those of torch.distributed.checkpoint.
#
# In Megatron-Core its planner finds keys that are not stored, and shapes that do not fit, so programs
# catch `torch.distributed.checkpoint.CheckpointException`. It derives from BaseException, not from Exception.


@contextmanager
def also_of_torch() -> Iterator[None]:
    """Raise a MissingKeyError or MismatchError of the block as an error that is also torch's."""
    try:
        yield
    except (MissingKeyError, MismatchError) as error:
        kind: Any = type(error)
        joined: Any = _class_for(kind)(error.message, key=error.key, rank=error.rank, path=error.path)
        joined.failures = {error.rank or 0: (error, None)}
        raise joined.with_traceback(error.__traceback__) from error.__cause__


@contextmanager
def naming_install() -> Iterator[None]:
    """Add to an error that proposes options how a program of Megatron-Core gives them: by `install()`."""
    try:
        yield
    except CheckpointError as error:
        options = [argument for proposed, argument in _AT_INSTALL.items() if proposed in error.message]
        if options and "install(" not in error.message:
            error.message += f" To Megatron-Core's names give it by install({', '.join(options)})."
        raise


_AT_INSTALL = {
    "SaveOptions(": "save_options=SaveOptions(...)",
    "LoadOptions(": "load_options=LoadOptions(...)",
}


@cache
def _class_for(kind: Any) -> type[CheckpointError]:
    from torch.distributed.checkpoint.api import CheckpointException

    return type(kind.__name__, (kind, CheckpointException), {"failures": {}, "__doc__": kind.__doc__})


# Names of Megatron-Core that megackpt does not support: they can be imported, and using one raises an error.
#
# An unmodified program may import such a name and never use it.


def raise_unsupported(name: str, *, because: str, instead: str) -> NoReturn:
    """Raise the error for a name of Megatron-Core that megackpt does not support.

    Raises:
        UnsupportedError: always; it says why, and what to use.
    """
    raise UnsupportedError(f"{name} of Megatron-Core is not offered by megackpt: {because} {instead}")


class _UnsupportedName(type):
    """A class that may be imported, subclassed and named in annotations; any other use raises an error.

    Attributes:
        reason: why, a sentence.
        alternative: what to use, a sentence.
    """

    reason: str
    alternative: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise_unsupported(cls.__name__, because=cls.reason, instead=cls.alternative)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python and its tools look for
            raise AttributeError(name)
        raise_unsupported(f"{cls.__name__}.{name}", because=cls.reason, instead=cls.alternative)


def unsupported_name(name: str, *, because: str, instead: str) -> Any:
    """Return what stands for a class or function of Megatron-Core that is not offered."""
    fields = {
        "__doc__": f"Not offered: {because} {instead}",
        "reason": because,
        "alternative": instead,
    }
    return _UnsupportedName(name, (), fields)


def is_unsupported_name(value: object) -> bool:
    """Return whether this stands for a name that is not offered."""
    return isinstance(value, _UnsupportedName)
