"""Substitutes for classes that a pickle names and torch does not know.

Members of enumerations, and named tuples whose classes are imported, are returned as themselves. For
conversions and comparisons only, other objects become stand-ins that do nothing but say how the pickle makes
them. Nothing is imported, and no code of such a class runs.
"""

from __future__ import annotations

import enum
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch._weights_only_unpickler as weights_only

from megackpt.codec.kinds import is_dotted
from megackpt.codec.members import (
    imported_enum,
    imported_named_tuple,
    member_named,
    member_of_value,
    named_class,
)
from megackpt.codec.stand_ins import ForeignMember, ForeignName, keeps_unknown_values

# A stand-in for the ShardedTensors in a pickle, such as those of the sharded state dicts of FSDP version 1.
#
# A pickle makes such a tensor in two steps. torch's own function makes a tensor of the class, without
# storage, and gives it its state: the local shards, metadata, and the numbers of the ranks. Only a subclass
# of Tensor can be made in this way.
#
# Source: torch 2.13 `torch._tensor._rebuild_from_type_v2` and `ShardedTensor.__getstate__`.

SHARDED_TENSOR = ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
"""Module and name of the class."""
PROCESS_GROUP_STATE = (SHARDED_TENSOR[0], "ShardedTensor.ProcessGroupState")
"""Module and name of a class in it, which its state has an instance of."""


class PickledShardedTensor(torch.Tensor):
    """A ShardedTensor while a pickle is read: it has the state, and every operation on it is an error.

    `plain_values` replaces it by a `ForeignShardedTensor`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *_: Any) -> PickledShardedTensor:
        """Reject other ways of making one: torch.Tensor would allocate as much memory as a pickle says."""
        raise TypeError("a ShardedTensor that torch did not pickle")

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Reject every operation, as there is no storage."""
        raise TypeError(f"the operation {func} on a ShardedTensor")

    def __setstate__(self, state: Any) -> None:
        vars(self)["pickled_state"] = state


MAX_UNKNOWN = 200
"""Limit of unknown names in a pickle whose unknown values are kept: each takes a class of this process."""


class ForbiddenClassError(ValueError):
    """A pickle names a class that is allowed only where unknown values are kept."""


@dataclass(frozen=True, slots=True)
class EnumMembers:
    """Substitute for an enumeration, which returns its members.

    With the class itself, a pickle could set attributes of it, or of its members, for the whole process.

    Attributes:
        cls: the enumeration.
        is_allowed: whether the class may use code of its own to look for a member.
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
            raise ForbiddenClassError(
                f"{value!r:.80} as a value of {module}.{name}, which has no such member"
            )
        return ForeignMember(module, name, None, _plain(value))


@dataclass(frozen=True, slots=True)
class UnknownMembers:
    """Substitute for an enumeration that is not imported; it returns stand-ins of its members."""

    of: ForeignName

    def __call__(self, value: Any) -> ForeignMember:
        """Return the stand-in of the member with this value."""
        return ForeignMember(self.of.module, self.of.qualname, None, _plain(value))


def _plain(value: Any) -> str | int | float | bool | None:
    if value is None or type(value) in (str, int, float, bool):
        plain: str | int | float | bool | None = value
        return plain
    raise ForbiddenClassError(f"a {type(value).__name__} as the value of a member")


@dataclass(frozen=True, slots=True)
class OuterClass:
    """Substitute for a class that a pickle names for the classes inside of it.

    Attributes:
        inner: their substitutes by name.
    """

    inner: Mapping[str, type]

    def __hash__(self) -> int:
        # torch keeps its list as a set, and a mapping has no hash.
        return id(self)


def member_by_getattr(members: Any, name: Any) -> Any:
    """Replace `getattr`, with which pickles have members of enumerations and classes in classes.

    Python 3.11.0 to 3.11.3 write members so. It returns nothing else.
    """
    if type(members) is OuterClass and type(name) is str and name in members.inner:
        return members.inner[name]
    if members is PickledShardedTensor and name == PROCESS_GROUP_STATE[1].rpartition(".")[2]:
        return stand_in_of(*PROCESS_GROUP_STATE)
    unknown = _name_of_unknown(members)
    if unknown is not None and type(name) is str and name.isidentifier():
        return ForeignMember(unknown.module, unknown.qualname, name, None)
    if type(members) is not EnumMembers or type(name) is not str:
        raise ForbiddenClassError("a call of getattr for something that is no member of an enumeration")
    member = member_named(members.cls, name)
    if member is None:
        raise ForbiddenClassError(
            f"{name!r:.80} as a member of {members.cls.__qualname__}, which has none such"
        )
    return member


def _name_of_unknown(cls: Any) -> ForeignName | None:
    """Return the name of a class whose members become stand-ins; None if this is no such class."""
    if type(cls) is UnknownMembers:
        return cls.of
    is_unknown = isinstance(cls, type) and issubclass(cls, UnknownObject) and keeps_unknown_values()
    return cls.of if is_unknown else None


def joined_flags(left: Any, right: Any) -> Any:
    """Replace `operator.or_`, with which Python 3.11.0 to 3.11.3 pickles combinations of flags."""
    if isinstance(left, enum.Flag) and type(right) in (type(left), int):
        return EnumMembers(type(left), is_allowed=False)(
            left.value | (right if type(right) is int else right.value)
        )
    if not keeps_unknown_values():
        raise ForbiddenClassError("a call of _operator.or_ for something that is no flag")
    return _unknown_class("_operator", "or_", is_harmless=False, is_named_tuple=False)(left, right)


class UnknownObject:
    """Stand-in for an instance of an unknown class, or the result of an unknown function: how it is made."""

    of: ForeignName
    """The class or function."""
    is_harmless: bool
    """Whether it may be made in every load."""
    is_named_tuple: bool = False
    """Whether the class is an imported named tuple: a load then returns a named tuple."""

    def __new__(cls, *args: Any) -> UnknownObject:
        """Make a stand-in, where unknown values are kept."""
        if not cls.is_harmless and not keeps_unknown_values():
            # A name alone may be harmless, such as that of an optimizer's class. An object of it is not.
            what = f"an object of class {cls.of.module}.{cls.of.qualname}"
            raise weights_only.UnpicklingError(what)  # type: ignore[attr-defined]
        stand_in = object.__new__(cls)
        vars(stand_in).update(args=args, is_called=False, state=None, items=[])
        return stand_in

    def __init__(self, *_: Any) -> None:
        # REDUCE calls the class and so this method; NEWOBJ calls `__new__` alone.
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
# Where the classes of optimizers are that Megatron-Core has in its parameter groups, imported or not.
_OPTIMIZERS = ("torch.optim.", "transformer_engine.", "apex.optimizers.", "megatron.core.optimizer.")
_CLASSES = {"megatron.core.optimizer.optimizer_config": ("OptimizerConfig",)}


def stand_in_of(module: str, name: str) -> Any:
    """Return the substitute for a name that torch does not know; None if it must not be loaded."""
    enumeration = imported_enum(module, name)
    if enumeration is not None:
        return EnumMembers(enumeration, is_allowed=False)
    if module == "signal" and member_named(signal.Signals, name) is not None:
        return member_named(signal.Signals, name)  # as Python 3.10 pickles it
    if name in _ENUMERATIONS.get(module, ()):
        return UnknownMembers(ForeignName(module, name))
    if imported_named_tuple(module, name) is not None:
        return _unknown_class(module, name, is_harmless=True, is_named_tuple=True)
    if (module, name) == SHARDED_TENSOR and keeps_unknown_values():
        return PickledShardedTensor
    is_harmless = name in _CLASSES.get(module, ())
    # Its own class if it is there: the caller then gets what was saved.
    if is_harmless and module in sys.modules and not keeps_unknown_values():
        return getattr(sys.modules[module], name, None)
    is_name = is_of_optimizer(module, name) or not isinstance(named_class(module, name), ForeignName)
    is_name = is_name or keeps_unknown_values()
    if is_harmless or (is_name and is_dotted(module) and is_dotted(name)):
        return _unknown_class(module, name, is_harmless, is_named_tuple=False)
    return None


def is_of_optimizer(module: str, name: str) -> bool:
    """Return whether a name is that of an optimizer's class that Megatron-Core may refer to."""
    return name[:1].isupper() and f"{module}.".startswith(_OPTIMIZERS)


@lru_cache(maxsize=4 * MAX_UNKNOWN)
def _unknown_class(module: str, name: str, is_harmless: bool, is_named_tuple: bool) -> type[UnknownObject]:
    """Return a class for a name, always the same: torch compares them, and several threads may load."""
    attributes = {"is_harmless": is_harmless, "is_named_tuple": is_named_tuple}
    return type("Unknown", (UnknownObject,), {"of": ForeignName(module, name), **attributes})


class StandInUnpickler(weights_only.Unpickler):
    """The unpickler of torch.load(weights_only=True), which also sets items of unknown subclasses of dict."""

    def _check_set_item_target(self, opcode: str) -> None:
        if not isinstance(self.stack[-1], UnknownObject):
            super()._check_set_item_target(opcode)
