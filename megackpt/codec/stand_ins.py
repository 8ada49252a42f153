"""Stand-ins for values that this process cannot make, as their classes or codecs are not there.

A load returns the first three kinds where a class is not imported. `convert` and `diff` carry along all
kinds, also those of `pickled`; they ask for it with `keep_unknown_values`. A save writes a stand-in back as
what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

PlainValue = str | int | float | bool | None
PLAIN_VALUE_CLASSES = (str, int, float, bool, type(None))


class StandInPickleError(TypeError):
    """A value that is to be pickled contains a stand-in, and the pickler does not know how to write it."""


class Unpicklable:
    """Base class of stand-ins. Pickled as an instance of its own class, one would load as something else."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StandInPickleError(type(self).__name__)  # its repr may be long, or take long


class Constant(Unpicklable):
    """Base class of stand-ins that cannot change: a copy, as optimizers make of their groups, is the same."""

    __slots__ = ()

    def __copy__(self) -> Constant:
        return self

    def __deepcopy__(self, memo: Any) -> Constant:
        return self


@dataclass(frozen=True, slots=True)
class ForeignName(Constant):
    """Stands for a class that is not imported or that a load never returns, or a function in a pickle.

    Two are equal if both names are. A save writes it back as the class that it stands for.

    Attributes:
        module: where it is defined.
        qualname: its name there.
    """

    module: str
    qualname: str

    def __repr__(self) -> str:
        return f"<{self.module}.{self.qualname}>"


@dataclass(frozen=True, slots=True)
class ForeignMember(Constant):
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
class ForeignNamedTuple(Unpicklable):
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
class ForeignCodecValue(Unpicklable):
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
