"""Codecs of members of enumerations and of named tuples.

A member is encoded by module, class and name, whatever its class; a named tuple by module, class and fields.
Where the class is not imported at a load, a stand-in takes the place of the value.
"""

from __future__ import annotations

import enum
from typing import Any

from megackpt.codec.imported_classes import (
    IMPLICIT_METHODS,
    imported_class,
    imported_enum,
    imported_named_tuple,
    member_fields,
    member_named,
    member_of_value,
    named_fields,
    named_tuple_of,
)
from megackpt.codec.kinds import (
    Kind,
    ValueDecoder,
    ValueEncoder,
    fields_of,
    list_of,
    text_of,
)
from megackpt.codec.stand_ins import (
    PLAIN_VALUE_CLASSES,
    ForeignMember,
    ForeignNamedTuple,
)
from megackpt.codec.tree import Json


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


def items_of(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a named tuple as a plain tuple, without `__iter__` of its class."""
    return tuple(tuple.__iter__(value))


MEMBER = Kind("$enum", (ForeignMember,), _encode_member, _decode_member)
"""Encodes members of all enumerations, and their stand-ins."""
NAMED_TUPLE = Kind("$namedtuple", (ForeignNamedTuple,), _encode_named_tuple, _decode_named_tuple)
"""Encodes named tuples of all classes, and their stand-ins."""

KINDS = (MEMBER, NAMED_TUPLE)
