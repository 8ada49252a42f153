"""Codecs of members of enumerations, of named tuples, and of classes.

A member is encoded by module, class and name, whatever its class; a named tuple by module, class and fields;
a class by module and name. Where a load does not find the class, a stand-in takes the place of the value.
"""

from __future__ import annotations

import enum
import sys
from types import FunctionType, ModuleType
from typing import Any

import torch

from megackpt.codec.containers import FACTORIES
from megackpt.codec.kinds import (
    Kind,
    ValueDecoder,
    ValueEncoder,
    dotted_of,
    fields_of,
    is_dotted,
    list_of,
    text_of,
)
from megackpt.codec.stand_ins import (
    PLAIN_VALUE_CLASSES,
    ForeignMember,
    ForeignName,
    ForeignNamedTuple,
    PlainValue,
    keeps_unknown_values,
)
from megackpt.codec.tree import Json

# Looks up classes by names that a file contains, without running any code for it.
#
# A class is looked up among the modules that are imported already, and taken only if it is an enumeration, a
# class of named tuples, or one that `named_class` may return. Nothing is imported, and no code of a module or
# class runs: dictionaries are read past module `__getattr__`, metaclasses, properties and `__missing__`.

# The interpreter's own way to these attributes, which no metaclass and no class of modules can replace.
_class_dict: Any = vars(type)["__dict__"].__get__
_class_mro: Any = vars(type)["__mro__"].__get__
_module_dict: Any = vars(ModuleType)["__dict__"].__get__

_DATA_CLASSES = (*FACTORIES.values(), torch.Tensor, torch.nn.Parameter)

# Methods that Python calls by itself for a value that is put into a dict, tested with isinstance, or dropped.
IMPLICIT_METHODS = ("__hash__", "__eq__", "__class__", "__getattribute__", "__del__")

# What a class of flags may consist of, so that combining flags runs only code of the standard library.
_STANDARD_BASES = (enum.Flag, enum.IntFlag, enum.Enum, int, object, getattr(enum, "ReprEnum", object))
_STANDARD_ATTRIBUTE_IDS = {id(value) for cls in _STANDARD_BASES for value in vars(cls).values()}
_CODE_CLASSES = (FunctionType, classmethod, property)
_NEVER_CALLED = frozenset(("__format__", "__reduce__", "__reduce_ex__", "__repr__", "__str__"))


def imported_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """Return an enumeration by its name; None if it is not imported, or is not an enumeration."""
    cls = imported_class(module, qualname)
    is_enum = cls is not None and _derives(cls, enum.Enum)
    return cls if is_enum and type(_class_dict(cls).get("_member_map_")) is dict else None


def imported_named_tuple(module: str, qualname: str) -> type[tuple[Any, ...]] | None:
    """Return a class of named tuples by its name; None if it is not imported, or is no such class.

    None too if the class has methods that would run without being called, such as `__eq__` for a key of a
    dict.
    """
    cls = imported_class(module, qualname)
    if cls is None or not _derives(cls, tuple) or named_fields(cls) is None:
        return None
    bases = [base for base in _class_mro(cls) if base is not tuple and base is not object]
    return None if any(name in _class_dict(base) for base in bases for name in IMPLICIT_METHODS) else cls


def imported_class(module: str, qualname: str) -> Any:
    """Return a class by its name if it is imported, else None."""
    imported = sys.modules.get(module)
    if imported is None or not _derives(type(imported), ModuleType):
        return None
    cls: Any = None
    names: Any = _module_dict(imported)
    for name in qualname.split("."):
        cls = names.get(name)
        if not _derives(type(cls), type):
            return None
        names = _class_dict(cls)
    return cls


def named_class(module: str, qualname: str) -> type | ForeignName:
    """Return a class by its name if a load may return it and it is imported, else a stand-in.

    A program may call what a load returns. So these are classes of optimizers, which Megatron-Core has in its
    parameter groups, classes that only hold data, and those that the user has allowed with
    `torch.serialization.add_safe_globals`.
    """
    cls = None if keeps_unknown_values() else imported_class(module, qualname)
    if cls is not None and (
        _derives(cls, torch.optim.Optimizer)
        or imported_enum(module, qualname) is not None
        or imported_named_tuple(module, qualname) is not None
        # Compared by identity: `in` would run methods of the metaclass.
        or any(cls is allowed for allowed in (*_DATA_CLASSES, *torch.serialization.get_safe_globals()))
    ):
        returned: type = cls
        return returned
    return ForeignName(module, qualname)


def is_class(value: object) -> bool:
    """Return whether a value is a class, also where its class says otherwise, as that of `list[int]` does."""
    return _derives(type(value), type)


def is_named_tuple(cls: type) -> bool:
    """Return whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def named_fields(cls: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a class of named tuples; None if it is no such class."""
    tables = (_class_dict(base) for base in _class_mro(cls))
    names = next((table["_fields"] for table in tables if "_fields" in table), None)
    is_named = type(names) is tuple and all(type(name) is str for name in names)
    return names if is_named else None


def named_tuple_of(
    module: str, qualname: str, values: tuple[Any, ...], *, fields: tuple[str, ...] | None = None
) -> tuple[Any, ...] | None:
    """Return a named tuple of an imported class; None if there is no such class, or it has other fields.

    Args:
        module: of the class.
        qualname: name of the class in its module.
        values: of the fields.
        fields: names that the class must have; None if only their number is known.
    """
    cls = imported_named_tuple(module, qualname)
    names = None if cls is None else named_fields(cls)
    if cls is None or names is None or len(names) != len(values) or fields not in (None, names):
        return None
    made: tuple[Any, ...] = tuple.__new__(cls, values)  # without `__new__` of the class
    return made


def member_named(cls: type[enum.Enum], name: str) -> enum.Enum | None:
    """Return a member by its name, which may be an alias; None if there is none."""
    member = _members(cls).get(name)
    return member if type(member) is cls else None


def member_of_value(cls: type[enum.Enum], value: PlainValue) -> enum.Enum | None:
    """Return a member, or a combination of flags, by its value; None if there is none."""
    # Not the dictionary by value: its lookup compares with keys of any class, which runs their code.
    for member in _members(cls).values():
        member_value = _attributes(member).get("_value_")
        if type(member_value) is type(value) and member_value == value:
            return member if type(member) is cls else None
    return _combination(cls, value) if type(value) is int and _derives(cls, enum.Flag) else None


def member_fields(member: enum.Enum) -> tuple[str | None, PlainValue]:
    """Return name and value of a member: no name of a combination of flags, no value that is not plain."""
    name, value = member._name_, member._value_
    is_named = isinstance(name, str) and member_named(type(member), name) is member
    return name if is_named else None, value if type(value) in PLAIN_VALUE_CLASSES else None


def _derives(cls: type, base: type) -> bool:
    """Return whether a class derives from another, without asking its metaclass."""
    return any(parent is base for parent in _class_mro(cls))


def _members(cls: type[enum.Enum]) -> dict[str, Any]:
    """Return the members by name, from the dictionary of the class."""
    members = _class_dict(cls).get("_member_map_")
    return members if type(members) is dict else {}


def _attributes(member: Any) -> dict[str, Any]:
    attributes: dict[str, Any] = object.__getattribute__(member, "__dict__")
    return attributes


def _combination(cls: type[enum.Enum], value: int) -> enum.Enum | None:
    """Combine flags as the standard library does; None if that would run code of the class.

    Only known flags are combined, so that a file cannot fill the class with values of its own.
    """
    bases = [base for base in _class_mro(cls) if base is not cls]
    table = _class_dict(cls).items()
    special = [item for name, item in table if name.startswith("_") and name not in _NEVER_CALLED]
    own = [i for i in special if isinstance(i, _CODE_CLASSES) and id(i) not in _STANDARD_ATTRIBUTE_IDS]
    is_standard = type(cls) is enum.EnumMeta and all(base in _STANDARD_BASES for base in bases) and not own
    bits = 0
    for member in _members(cls).values():
        bits |= _attributes(member).get("_value_", 0) if is_standard else 0
    if value < 0 or value & ~bits or not is_standard:
        return None
    combined: enum.Enum = enum.Flag._missing_.__func__(cls, value)  # type: ignore[attr-defined]
    return combined


def _encode_member(value: enum.Enum | ForeignMember, encoder: ValueEncoder) -> Json:
    if isinstance(value, ForeignMember):
        module, qualname, name, plain = value.module, value.qualname, value.name, value.value
    else:
        cls = type(value)
        module, qualname = cls.__module__, cls.__qualname__
        name, plain = member_fields(value)
        if name is None and plain is None:
            raise encoder.error(
                f"{value!r} has neither a name nor a plain value. Save a plain value instead."
            )
    names = {"module": module, "class": qualname, "name": name}
    return {**names, "value": encoder.child("value", plain)}


def _decode_member(tree: Json, decoder: ValueDecoder) -> enum.Enum | ForeignMember:
    fields = fields_of(tree, "module", "class", "name", "value")
    module, qualname = text_of(fields[0]), text_of(fields[1])
    name = None if fields[2] is None else text_of(fields[2])
    value = decoder.child("value", fields[3])
    if type(value) not in PLAIN_VALUE_CLASSES:
        raise TypeError("a member has a str, a number, a bool or nothing as its value")
    cls = imported_enum(module, qualname)
    member = None
    if cls is not None:
        member = member_of_value(cls, value) if name is None else member_named(cls, name)
    return ForeignMember(module, qualname, name, value) if member is None else member


def _encode_named_tuple(value: tuple[Any, ...] | ForeignNamedTuple, encoder: ValueEncoder) -> Json:
    if isinstance(value, ForeignNamedTuple):
        module, qualname, names, values = value.module, value.qualname, value.fields, value.values
    else:
        cls = type(value)
        module, qualname = cls.__module__, cls.__qualname__
        check_named_tuple(value, encoder)
        names, values = named_fields(cls) or (), items_of(value)
    pairs = zip(names, values, strict=True)
    fields: list[Json] = [[name, encoder.child(name, item)] for name, item in pairs]
    return {"module": module, "class": qualname, "fields": fields}


def check_named_tuple(value: tuple[Any, ...], encoder: ValueEncoder) -> None:
    """Check that a load in this process would return an equal named tuple.

    Raises:
        UnserializableError: it would not.
    """
    cls = type(value)
    reason = _why_not_equal(value, cls)
    if reason:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise encoder.error(
            f"{name} is a named tuple that a load would not return unchanged: {reason}. Save plain values, "
            f"or register it before saving and before loading: "
            f"megackpt.register_codec({cls.__name__}, {name!r}, encode, decode)."
        )


def _why_not_equal(value: tuple[Any, ...], cls: type) -> str:
    """Return why a load would not return an equal named tuple; "" if it would."""
    names = named_fields(cls)
    if names is None or len(names) != tuple.__len__(value):
        return f"it has {tuple.__len__(value)} items, and its _fields are {names!r}"
    if getattr(value, "__dict__", None):
        return f"it has attributes besides its fields: {', '.join(sorted(vars(value)))}"
    if imported_class(cls.__module__, cls.__qualname__) is not cls:
        return "its class cannot be found by this name"
    if imported_named_tuple(cls.__module__, cls.__qualname__) is not cls:
        return f"its class defines one of {', '.join(IMPLICIT_METHODS)}, which a load would run"
    return ""


def _decode_named_tuple(tree: Json, decoder: ValueDecoder) -> tuple[Any, ...] | ForeignNamedTuple:
    module, qualname, fields = fields_of(tree, "module", "class", "fields")
    pairs = [list_of(pair, length=2) for pair in list_of(fields)]
    names = tuple(text_of(name) for name, _ in pairs)
    if len(set(names)) != len(names):
        raise ValueError("a field is repeated")
    values = tuple(decoder.child(name, item) for name, (_, item) in zip(names, pairs, strict=True))
    loaded = named_tuple_of(text_of(module), text_of(qualname), values, fields=names)
    return ForeignNamedTuple(text_of(module), text_of(qualname), names, values) if loaded is None else loaded


def _encode_name(value: type | ForeignName, encoder: ValueEncoder) -> Json:
    if isinstance(value, ForeignName):
        return {"module": value.module, "class": value.qualname}
    module, qualname = value.__module__, value.__qualname__
    if imported_class(module, qualname) is not value or not is_dotted(f"{module}.{qualname}"):
        raise encoder.error(
            f"{value!r} is a class that no load can find by its name, {module}.{qualname}. Define it at the "
            f"top of a module, or save a name for it, such as {qualname.rpartition('.')[2]!r}."
        )
    return {"module": module, "class": qualname}


def _decode_name(tree: Json, decoder: ValueDecoder) -> type | ForeignName:
    module, qualname = fields_of(tree, "module", "class")
    return named_class(dotted_of(module), dotted_of(qualname))


def items_of(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a named tuple as a plain tuple, without `__iter__` of its class."""
    return tuple(tuple.__iter__(value))


MEMBER = Kind("$enum", (ForeignMember,), _encode_member, _decode_member)
"""Encodes members of all enumerations, and their stand-ins."""
NAMED_TUPLE = Kind("$namedtuple", (ForeignNamedTuple,), _encode_named_tuple, _decode_named_tuple)
"""Encodes named tuples of all classes, and their stand-ins."""

NAME = Kind("$name", (ForeignName,), _encode_name, _decode_name)
"""Encodes classes of all metaclasses, and the stand-ins of classes and functions."""

KINDS = (MEMBER, NAMED_TUPLE, NAME)
