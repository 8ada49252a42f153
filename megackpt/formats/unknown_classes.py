"""Classes that a pickle names and that torch does not know: what stands for them while it is read.

Gives members of enumerations and named tuples whose classes are imported, and, for conversions and
comparisons only, objects that do nothing but say how the pickle makes them. Nothing is imported and no code
of such a class runs.
"""

from __future__ import annotations

import enum
import signal
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch._weights_only_unpickler as weights_only

from megackpt.codec.imported_classes import (
    imported_enum,
    imported_named_tuple,
    is_dotted,
    member_named,
    member_of_value,
)
from megackpt.codec.stand_ins import ForeignMember, ForeignName, keeps_unknown_values

MOST_UNKNOWN = 200
"""How many unknown names a pickle may have that is carried along: each takes a class of this process."""


class RefusedClassError(ValueError):
    """A pickle would make something of a class that it may only have where values are carried along."""


@dataclass(frozen=True, slots=True)
class Members:
    """Stands for an enumeration: gives its members.

    Were it the class itself, a pickle could set attributes of it, or of its members, for the whole process.

    Attributes:
        cls: the enumeration.
        is_allowed: whether the class may look for a member by code of its own.
    """

    cls: type[enum.Enum]
    is_allowed: bool

    def __call__(self, value: Any) -> Any:
        """Return the member with this value."""
        member = member_of_value(self.cls, value)
        if member is not None:
            return member
        if self.is_allowed:
            return self.cls(value)
        module, name = self.cls.__module__, self.cls.__qualname__
        if not keeps_unknown_values():
            raise RefusedClassError(f"{value!r:.80} as a value of {module}.{name}, which has no such member")
        return ForeignMember(module, name, None, _plain(value))


@dataclass(frozen=True, slots=True)
class UnknownMembers:
    """Stands for an enumeration that is not imported: gives stand-ins of its members."""

    of: ForeignName

    def __call__(self, value: Any) -> ForeignMember:
        """Return the stand-in of the member with this value."""
        return ForeignMember(self.of.module, self.of.qualname, None, _plain(value))


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or type(value) in (str, int, float, bool):
        plain: str | int | float | bool | None = value
        return plain
    raise RefusedClassError(f"a {type(value).__name__} as the value of a member")


def member_by_getattr(members: Any, name: Any) -> Any:
    """Stand for `getattr`, by which Python 3.11.0 to 3.11.3 pickle members; it finds nothing else."""
    if type(members) is not Members or type(name) is not str:
        raise RefusedClassError("a call of getattr for something that is no member of an enumeration")
    member = member_named(members.cls, name)
    if member is None:
        raise RefusedClassError(
            f"{name!r:.80} as a member of {members.cls.__qualname__}, which has none such"
        )
    return member


class Unknown:
    """An instance of an unknown class, or what an unknown function returns: it says how it is made."""

    of: ForeignName
    """The class or function."""
    is_harmless: bool
    """Whether it may be made everywhere."""
    is_named_tuple: bool = False
    """Whether the class is an imported one of named tuples: then a load makes a named tuple of it."""

    def __new__(cls, *args: Any) -> Unknown:
        """Make one, where values are carried along."""
        if not cls.is_harmless and not keeps_unknown_values():
            raise RefusedClassError(f"an object of {cls.of.module}.{cls.of.qualname}")
        made = object.__new__(cls)
        vars(made).update(args=args, is_called=False, state=None, items=[])
        return made

    def __init__(self, *_: Any) -> None:
        vars(self)["is_called"] = True

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self)["items"].append((key, value))


# Source: Megatron-Core, megatron/core/safe_globals.py.
_ENUMERATIONS = {
    "megatron.core.enums": ("ModelType",),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
    "megatron.core.transformer.enums": (
        "AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope", "ModelType",
    ),
}  # fmt: skip
_CLASSES = {"megatron.core.optimizer.optimizer_config": ("OptimizerConfig",)}


def stand_in_of(module: str, name: str) -> Any:
    """Return what stands for a name in a pickle that torch does not know; None if it is to be refused."""
    found = imported_enum(module, name)
    if found is not None:
        return Members(found, is_allowed=False)
    if module == "signal" and member_named(signal.Signals, name) is not None:
        return member_named(signal.Signals, name)  # as Python 3.10 pickles it
    if name in _ENUMERATIONS.get(module, ()):
        return UnknownMembers(ForeignName(module, name))
    if imported_named_tuple(module, name) is not None:
        return _unknown_class(module, name, is_harmless=True, is_named_tuple=True)
    is_harmless = name in _CLASSES.get(module, ())
    if is_harmless and module in sys.modules and not keeps_unknown_values():
        return getattr(sys.modules[module], name, None)
    if is_harmless or (keeps_unknown_values() and is_dotted(module) and is_dotted(name)):
        return _unknown_class(module, name, is_harmless, is_named_tuple=False)
    return None


@lru_cache(maxsize=4 * MOST_UNKNOWN)
def _unknown_class(module: str, name: str, is_harmless: bool, is_named_tuple: bool) -> type[Unknown]:
    """Return the same class for a name each time: torch compares them, and several threads may load."""
    about = {"is_harmless": is_harmless, "is_named_tuple": is_named_tuple}
    return type("Unknown", (Unknown,), {"of": ForeignName(module, name), **about})


class CarryingUnpickler(weights_only.Unpickler):
    """The unpickler of torch.load(weights_only=True), which also sets items of unknown subclasses of dict."""

    def _check_set_item_target(self, opcode: str) -> None:
        if not isinstance(self.stack[-1], Unknown):
            super()._check_set_item_target(opcode)
