"""Names of Megatron-Core that are not offered: they can be imported, and say so when they are used.

Owns how that is said. An unmodified program may import such a name and never use it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from megackpt.errors import UnsupportedError


def refuse(name: str, *, because: str, instead: str) -> NoReturn:
    """Refuse to do what `name` does in Megatron-Core.

    Raises:
        UnsupportedError: always; it says why, and what to use.
    """
    raise UnsupportedError(f"{name} of Megatron-Core is not offered by megackpt: {because} {instead}")


class _Refusing(type):
    """A class that refuses to be used, but may be imported, subclassed and named in annotations.

    Attributes:
        refused_because: why, a sentence.
        refused_instead: what to use, a sentence.
    """

    refused_because: str
    refused_instead: str

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        refuse(cls.__name__, because=cls.refused_because, instead=cls.refused_instead)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # what Python and its tools look for
            raise AttributeError(name)
        refuse(f"{cls.__name__}.{name}", because=cls.refused_because, instead=cls.refused_instead)


def refused(name: str, *, because: str, instead: str) -> Any:
    """Return what stands for a class or function of Megatron-Core that is not offered."""
    fields = {
        "__doc__": f"Not offered: {because} {instead}",
        "refused_because": because,
        "refused_instead": instead,
    }
    return _Refusing(name, (), fields)


def is_refused(found: object) -> bool:
    """Say whether this stands for a name that is not offered."""
    return isinstance(found, _Refusing)
