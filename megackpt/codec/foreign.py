"""Codecs of members of enumerations and of named tuples, and stand-ins for what this process does not have.

A member is encoded by module, class and name, whatever its class; a named tuple by module, class and fields.

A class that a file names is looked up among the modules that are imported already, and taken only if it is
one of enumerations or named tuples. Nothing is imported, and no code of a module or class runs: dictionaries
are read past module `__getattr__`, metaclasses, properties and `__missing__`.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from megackpt.codec.kinds import Kind, Reading, Writing, fields_of, list_of, text_of
from megackpt.codec.tree import Json

Plain = str | int | float | bool | None
_PLAIN_CLASSES = (str, int, float, bool, type(None))


class HoldsForeignError(TypeError):
    """A value that is to be pickled holds a stand-in, which needs a pickler that knows it."""


class _Unpicklable:
    """What pickle does not take: as an instance of its own class it would come back as something else."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise HoldsForeignError(repr(self))


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
    value: Plain

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
    """Stands for an object of a class that a pickle names and that is not on the list of harmless ones.

    `convert` and `diff` carry such objects along. A save writes one back as it was.

    Attributes:
        module: of the class, or of the function that made the object.
        qualname: its name there.
        args: what it was called with.
        is_called: whether the class or function was called; else only `__new__` of the class.
        state: what was handed to `__setstate__`, or was to become the attributes; None if there is nothing.
        items: what was set by key afterwards, as in a subclass of dict.
    """

    module: str
    qualname: str
    args: tuple[Any, ...]  # Any: whatever somebody pickled
    is_called: bool
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForeignRegistered(_Unpicklable):
    """Stands for a value of a codec that is not registered in this process; see `carrying_unknown`.

    Attributes:
        name: of the codec.
        value: what its encode function has returned.
    """

    name: str
    value: Any


_carries: ContextVar[bool] = ContextVar("megackpt_carries_unknown", default=False)


@contextmanager
def carrying_unknown() -> Iterator[None]:
    """Decode what this process does not understand to stand-ins, in this thread, instead of refusing it.

    For conversions and comparisons, which only hand values on.
    """
    token = _carries.set(True)
    try:
        yield
    finally:
        _carries.reset(token)


def carries_unknown() -> bool:
    """Say whether this thread is inside of `carrying_unknown`."""
    return _carries.get()


def imported_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """Return an enumeration by its name if it is imported; None if it is not, or is no enumeration."""
    found = _imported_class(module, qualname)
    is_enum = found is not None and _derives(found, enum.Enum)
    return found if is_enum and type(_class_dict(found).get("_member_map_")) is dict else None


def imported_named_tuple(module: str, qualname: str) -> type[tuple[Any, ...]] | None:
    """Return a class of named tuples by its name if it is imported; None if it is not, or is no such class.

    None too if the class has methods that would run without being called, such as `__eq__` for a key of a
    dict.
    """
    found = _imported_class(module, qualname)
    if found is None or not _derives(found, tuple) or named_fields(found) is None:
        return None
    own = [cls for cls in _class_mro(found) if cls is not tuple and cls is not object]
    return None if any(name in _class_dict(cls) for cls in own for name in _RUN_UNASKED) else found


def named_fields(cls: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a class of named tuples, from the class; None if it is none."""
    holders = (_class_dict(one) for one in _class_mro(cls))
    names = next((table["_fields"] for table in holders if "_fields" in table), None)
    is_named = type(names) is tuple and all(type(name) is str for name in names)
    return names if is_named else None


def _imported_class(module: str, qualname: str) -> Any:
    """Return a class by its name if it is imported, else None."""
    where = sys.modules.get(module)
    if where is None or not _derives(type(where), ModuleType):
        return None
    found: Any = None
    names: Any = _module_dict(where)
    for name in qualname.split("."):
        found = names.get(name)
        if not _derives(type(found), type):
            return None
        names = _class_dict(found)
    return found


def member_named(cls: type[enum.Enum], name: str) -> enum.Enum | None:
    """Return a member by its name, aliases among them; None if there is none."""
    found = _members(cls).get(name)
    return found if type(found) is cls else None


def member_of_value(cls: type[enum.Enum], value: Plain) -> enum.Enum | None:
    """Return a member, or a combination of flags, by its value; None if there is none."""
    # The dictionary by value would compare with keys of any class, by code of theirs.
    for member in _members(cls).values():
        its = _attributes(member).get("_value_")
        if type(its) is type(value) and its == value:
            return member if type(member) is cls else None
    return _combination(cls, value) if type(value) is int and _derives(cls, enum.Flag) else None


def member_fields(member: enum.Enum) -> tuple[str | None, Plain]:
    """Return the name of a member, None of a combination of flags, and the value if it is plain."""
    name, value = member._name_, member._value_
    is_named = isinstance(name, str) and member_named(type(member), name) is member
    return name if is_named else None, value if type(value) in _PLAIN_CLASSES else None


# What the interpreter itself offers, whatever a metaclass or a class of modules puts in its place.
_class_dict: Any = vars(type)["__dict__"].__get__
_class_mro: Any = vars(type)["__mro__"].__get__
_module_dict: Any = vars(ModuleType)["__dict__"].__get__


def _derives(cls: type, base: type) -> bool:
    """Say whether a class derives from another, whatever its metaclass says about it."""
    return any(one is base for one in _class_mro(cls))


def _members(cls: type[enum.Enum]) -> dict[str, Any]:
    """Return the members by name, from the class itself."""
    members = _class_dict(cls).get("_member_map_")
    return members if type(members) is dict else {}


def _attributes(member: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(member, "__dict__")
    return found


# What Python itself calls of a value that is put into a dict, tested with isinstance, or dropped.
_RUN_UNASKED = ("__hash__", "__eq__", "__class__", "__getattribute__", "__del__")
_FUNCTIONS = (FunctionType, classmethod, property)
_OF_STANDARD = (enum.Flag, enum.IntFlag, enum.Enum, int, object, getattr(enum, "ReprEnum", object))
_NOT_CALLED = frozenset(("__format__", "__reduce__", "__reduce_ex__", "__repr__", "__str__"))
_STANDARD = {id(value) for cls in _OF_STANDARD for value in vars(cls).values()}


def _combination(cls: type[enum.Enum], value: int) -> enum.Enum | None:
    """Combine flags as the standard library does; None if that would run code of the class.

    Only known flags are combined, so that a file cannot fill the class with values of its own.
    """
    bases = [one for one in _class_mro(cls) if one is not cls]
    table = _class_dict(cls).items()
    special = [item for name, item in table if name.startswith("_") and name not in _NOT_CALLED]
    own = [item for item in special if isinstance(item, _FUNCTIONS) and id(item) not in _STANDARD]
    is_standard = type(cls) is enum.EnumMeta and all(base in _OF_STANDARD for base in bases) and not own
    bits = 0
    for member in _members(cls).values():
        bits |= _attributes(member).get("_value_", 0) if is_standard else 0
    if value < 0 or value & ~bits or not is_standard:
        return None
    found: enum.Enum = enum.Flag._missing_.__func__(cls, value)  # type: ignore[attr-defined]
    return found


def _encode_member(value: enum.Enum | ForeignMember, writing: Writing) -> Json:
    if isinstance(value, ForeignMember):
        module, qualname, name, plain = value.module, value.qualname, value.name, value.value
    else:
        cls = type(value)
        module, qualname = cls.__module__, cls.__qualname__
        name, plain = member_fields(value)
        if name is None and plain is None:
            raise writing.refusal(f"{value!r} has neither a name nor a plain value. Save something plainer.")
    names = {"module": module, "class": qualname, "name": name}
    return {**names, "value": writing.child("value", plain)}


def _decode_member(tree: Json, reading: Reading) -> enum.Enum | ForeignMember:
    fields = fields_of(tree, "module", "class", "name", "value")
    module, qualname = text_of(fields[0]), text_of(fields[1])
    name = None if fields[2] is None else text_of(fields[2])
    value = reading.child("value", fields[3])
    if type(value) not in _PLAIN_CLASSES:
        raise TypeError("a member has a str, a number, a bool or nothing as its value")
    cls = imported_enum(module, qualname)
    member = None
    if cls is not None:
        member = member_of_value(cls, value) if name is None else member_named(cls, name)
    return ForeignMember(module, qualname, name, value) if member is None else member


def _encode_named_tuple(value: tuple[Any, ...] | ForeignNamedTuple, writing: Writing) -> Json:
    if isinstance(value, ForeignNamedTuple):
        module, qualname, names, values = value.module, value.qualname, value.fields, value.values
    else:
        cls = type(value)
        module, qualname = cls.__module__, cls.__qualname__
        _check_named_tuple(value, writing)
        names, values = named_fields(cls) or (), _items_of(value)
    pairs = zip(names, values, strict=True)
    fields: list[Json] = [[name, writing.child(name, item)] for name, item in pairs]
    return {"module": module, "class": qualname, "fields": fields}


def _check_named_tuple(value: tuple[Any, ...], writing: Writing) -> None:
    """Check that a load in this process would give an equal named tuple.

    Raises:
        UnserializableError: it would not.
    """
    cls = type(value)
    reason = _why_not_loaded(value, cls)
    if reason:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise writing.refusal(
            f"{name} is a named tuple that would not come back as it is: {reason}. Save plain values, or "
            f"register it before saving and before loading: "
            f"megackpt.register_codec({cls.__name__}, {name!r}, encode, decode)."
        )


def _why_not_loaded(value: tuple[Any, ...], cls: type) -> str:
    names = named_fields(cls)
    if names is None or len(names) != tuple.__len__(value):
        return f"it has {tuple.__len__(value)} items, and its _fields are {names!r}"
    if getattr(value, "__dict__", None):
        return f"it has attributes besides its fields: {', '.join(sorted(vars(value)))}"
    if _imported_class(cls.__module__, cls.__qualname__) is not cls:
        return "its class cannot be found by this name"
    if imported_named_tuple(cls.__module__, cls.__qualname__) is not cls:
        return f"its class defines one of {', '.join(_RUN_UNASKED)}, which a load would run"
    return ""


def _decode_named_tuple(tree: Json, reading: Reading) -> tuple[Any, ...] | ForeignNamedTuple:
    module, qualname, fields = fields_of(tree, "module", "class", "fields")
    pairs = [list_of(pair, length=2) for pair in list_of(fields)]
    names = tuple(text_of(name) for name, _ in pairs)
    if len(set(names)) != len(names):
        raise ValueError("a field is repeated")
    values = tuple(reading.child(name, item) for name, (_, item) in zip(names, pairs, strict=True))
    found = named_tuple_of(text_of(module), text_of(qualname), values, fields=names)
    return ForeignNamedTuple(text_of(module), text_of(qualname), names, values) if found is None else found


def named_tuple_of(
    module: str, qualname: str, values: tuple[Any, ...], *, fields: tuple[str, ...] | None = None
) -> tuple[Any, ...] | None:
    """Return a named tuple of an imported class; None if there is no such class, or it has other fields.

    fields are the names that the class must have; None if only their number is known.
    """
    cls = imported_named_tuple(module, qualname)
    names = None if cls is None else named_fields(cls)
    if cls is None or names is None or len(names) != len(values) or fields not in (None, names):
        return None
    made: tuple[Any, ...] = tuple.__new__(cls, values)  # past `__new__` of the class
    return made


def _items_of(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a named tuple as a plain tuple, whatever its class says about iteration."""
    return tuple(tuple.__iter__(value))


def _encode_name(value: ForeignName, writing: Writing) -> Json:
    return {"module": value.module, "class": value.qualname}


def _decode_name(tree: Json, reading: Reading) -> ForeignName:
    return ForeignName(*map(_dotted, fields_of(tree, "module", "class")))


def _encode_object(value: ForeignObject, writing: Writing) -> Json:
    return {
        "module": value.module,
        "class": value.qualname,
        "called": value.is_called,
        "args": [writing.child(index, item) for index, item in enumerate(value.args)],
        "state": writing.child("state", value.state),
        "items": [[writing.child("key", key), writing.child(key, item)] for key, item in value.items],
    }


def _decode_object(tree: Json, reading: Reading) -> enum.Enum | tuple[Any, ...] | ForeignObject:
    names = ("module", "class", "called", "args", "state", "items")
    module, qualname, is_called, args, state, items = fields_of(tree, *names)
    if type(is_called) is not bool:
        raise TypeError("true or false is expected")
    pairs = [list_of(pair, length=2) for pair in list_of(items)]
    found = ForeignObject(
        _dotted(module),
        _dotted(qualname),
        tuple(reading.child(index, item) for index, item in enumerate(list_of(args))),
        is_called,
        reading.child("state", state),
        [(reading.child("key", key), reading.child("item", item)) for key, item in pairs],
    )
    member, named = member_meant(found), named_tuple_meant(found)
    return member if member is not None else found if named is None else named


def named_tuple_meant(value: ForeignObject) -> tuple[Any, ...] | None:
    """Return the named tuple of an imported class that an object of a pickle stands for; else None."""
    is_made = not value.is_called and value.state is None and not value.items
    return named_tuple_of(value.module, value.qualname, value.args) if is_made else None


def member_meant(value: ForeignObject) -> enum.Enum | None:
    """Return the member of an imported enumeration that an object of a pickle stands for; else None."""
    is_call = value.is_called and len(value.args) == 1 and value.state is None and not value.items
    if not is_call or type(value.args[0]) not in _PLAIN_CLASSES:
        return None
    cls = imported_enum(value.module, value.qualname)
    return None if cls is None else member_of_value(cls, value.args[0])


def as_pickled(value: object, writing: Writing) -> object:
    """Return a member with a plain value, or a named tuple, as what a pickle of it is read as elsewhere.

    Anything else is returned as it is. Where the class is not imported, a pickle does not say which member
    has the value, or how fields are called.

    Raises:
        UnserializableError: a load would not give an equal named tuple.
    """
    if isinstance(value, ForeignNamedTuple):
        return ForeignObject(value.module, value.qualname, value.values, is_called=False)
    cls = type(value)
    if isinstance(value, tuple) and not isinstance(value, enum.Enum) and named_fields(cls) is not None:
        _check_named_tuple(value, writing)
        return ForeignObject(cls.__module__, cls.__qualname__, _items_of(value), is_called=False)
    if isinstance(value, ForeignMember):
        module, qualname, plain = value.module, value.qualname, value.value
    elif isinstance(value, enum.Enum):
        module, qualname = type(value).__module__, type(value).__qualname__
        plain = member_fields(value)[1]
    else:
        return value
    return value if plain is None else ForeignObject(module, qualname, (plain,), is_called=True)


def _dotted(tree: Json) -> str:
    name = text_of(tree)
    if not is_dotted(name):
        raise ValueError(f"{name[:80]!r} is no name of a module or class")
    return name


def is_dotted(name: str) -> bool:
    """Say whether a name consists of identifiers and dots between them."""
    return all(part.isidentifier() for part in name.split("."))


MEMBER = Kind("$enum", (ForeignMember,), _encode_member, _decode_member)
"""Of members of every enumeration, besides that of their stand-in."""
NAMED_TUPLE = Kind("$namedtuple", (ForeignNamedTuple,), _encode_named_tuple, _decode_named_tuple)
"""Of named tuples of every class, besides that of their stand-in."""

KINDS = (
    MEMBER,
    NAMED_TUPLE,
    Kind("$name", (ForeignName,), _encode_name, _decode_name),
    Kind("$foreign", (ForeignObject,), _encode_object, _decode_object),
)
