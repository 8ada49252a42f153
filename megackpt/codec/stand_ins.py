"""Stand-ins for values that this process cannot make, as their classes or codecs are not there.

A load returns the first two kinds where a class is not imported. `convert` and `diff` carry along all kinds;
they ask for it with `keep_unknown_values`. A save writes a stand-in back as what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

PlainValue = str | int | float | bool | None
PLAIN_VALUE_CLASSES = (str, int, float, bool, type(None))


class StandInPickleError(TypeError):
    """A value that is to be pickled contains a stand-in, and the pickler does not know how to write it."""


class _Unpicklable:
    """Base class of stand-ins. Pickled as an instance of its own class, one would load as something else."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StandInPickleError(type(self).__name__)  # its repr may be long, or take long


@dataclass(frozen=True, slots=True)
class ForeignMember(_Unpicklable):
    """Stands for a member of an enumeration that is not imported, or no longer has the member.

    Two are equal if all attributes are. A save writes it back as the member that it stands for.

    Attributes:
        module: of the class.
        qualname: name of the class in its module.
        name: of the member; None for a combination of flags.
        value: of the member; None if it is not a str, int, float or bool.
    """

    module: str
    qualname: str
    name: str | None
    value: PlainValue

    def __repr__(self) -> str:
        name = "" if self.name is None else f".{self.name}"
        return f"<{self.module}.{self.qualname}{name}: {self.value!r}>"


@dataclass(frozen=True, slots=True)
class ForeignNamedTuple(_Unpicklable):
    """Stands for a named tuple whose class is not imported, or no longer has these fields.

    Two are equal if all attributes are. A save writes it back as the named tuple that it stands for.

    Attributes:
        module: of the class.
        qualname: name of the class in its module.
        fields: names of the fields, in order.
        values: their values.
    """

    module: str
    qualname: str
    fields: tuple[str, ...]
    values: tuple[Any, ...]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self.fields, self.values, strict=True))
        return f"<{self.module}.{self.qualname}({fields})>"


@dataclass(frozen=True, slots=True)
class ForeignName(_Unpicklable):
    """Stands for a class or a function that a pickle refers to by its name.

    Attributes:
        module: where it is defined.
        qualname: its name there.
    """

    module: str
    qualname: str


@dataclass(slots=True, eq=False)
class ForeignObject(_Unpicklable):
    """Stands for an object in a pickle whose class is not on the list of harmless ones.

    `convert` and `diff` carry such objects along. A save writes one back as it was.

    Attributes:
        module: of the class, or of the function that made the object.
        qualname: its name there.
        args: what the class or function was called with.
        is_called: whether the class or function was called; if not, only `__new__` of the class was.
        state: the argument of `__setstate__`, or what was to become the attributes; None if there is none.
        items: what was set by key afterwards, as in a subclass of dict.
    """

    module: str
    qualname: str
    args: tuple[Any, ...]  # Any: whatever somebody pickled
    is_called: bool
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ForeignShardedTensor(_Unpicklable):
    """Stands for a ShardedTensor of torch in a pickle, as of FSDP version 1. It is never written back.

    Attributes:
        state: what its `__getstate__` returned, with stand-ins for objects; None if there is none.
    """

    state: Any  # Any: whatever somebody pickled


@dataclass(frozen=True, slots=True)
class ForeignCodecValue(_Unpicklable):
    """Stands for a value of a codec that is not registered in this process; see `keep_unknown_values`.

    Attributes:
        name: of the codec.
        value: what its encode function has returned.
    """

    name: str
    value: Any


_keeps_unknown: ContextVar[bool] = ContextVar("megackpt_keeps_unknown_values", default=False)


@contextmanager
def keep_unknown_values() -> Iterator[None]:
    """In the block, decode what this process cannot make as stand-ins, in this thread, and raise no error.

    For conversions and comparisons, which only pass values on.
    """
    token = _keeps_unknown.set(True)
    try:
        yield
    finally:
        _keeps_unknown.reset(token)


def keeps_unknown_values() -> bool:
    """Return whether this thread is inside of `keep_unknown_values`."""
    return _keeps_unknown.get()
