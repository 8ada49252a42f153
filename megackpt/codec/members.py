"""Codecs of members of enumerations, of named tuples, and of the stand-ins for values from pickles.

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
    is_dotted,
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
    integer_of,
    list_of,
    text_of,
)
from megackpt.codec.stand_ins import (
    PLAIN_VALUE_CLASSES,
    ForeignMember,
    ForeignName,
    ForeignNamedTuple,
    ForeignObject,
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
        _check_named_tuple(value, encoder)
        names, values = named_fields(cls) or (), _items_of(value)
    pairs = zip(names, values, strict=True)
    fields: list[Json] = [[name, encoder.child(name, item)] for name, item in pairs]
    return {"module": module, "class": qualname, "fields": fields}


def _check_named_tuple(value: tuple[Any, ...], encoder: ValueEncoder) -> None:
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


def _items_of(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the items of a named tuple as a plain tuple, without `__iter__` of its class."""
    return tuple(tuple.__iter__(value))


def _encode_name(value: ForeignName, encoder: ValueEncoder) -> Json:
    return {"module": value.module, "class": value.qualname}


def _decode_name(tree: Json, decoder: ValueDecoder) -> ForeignName:
    return ForeignName(*map(_dotted, fields_of(tree, "module", "class")))


def _encode_object(value: ForeignObject, encoder: ValueEncoder) -> Json:
    args: Json = [encoder.child(index, item) for index, item in enumerate(value.args)]
    names: dict[str, Json] = {
        "module": value.module,
        "class": value.qualname,
        "called": value.is_called,
    }
    encoder.enclosing.append(value)  # not for args: there is no object yet
    state = encoder.child("state", value.state)
    items: list[Json] = [[encoder.child("key", key), encoder.child(key, item)] for key, item in value.items]
    encoder.enclosing.pop()
    return {**names, "args": args, "state": state, "items": items}


def _decode_object(tree: Json, decoder: ValueDecoder) -> enum.Enum | tuple[Any, ...] | ForeignObject:
    names = ("module", "class", "called", "args", "state", "items")
    module, qualname, is_called, args, state, items = fields_of(tree, *names)
    if type(is_called) is not bool:
        raise TypeError("true or false is expected")
    pairs = [list_of(pair, length=2) for pair in list_of(items)]
    decoded_args = tuple(decoder.child(index, item) for index, item in enumerate(list_of(args)))
    value = ForeignObject(_dotted(module), _dotted(qualname), decoded_args, is_called)
    decoder.enclosing.append(value)
    value.state = decoder.child("state", state)
    value.items += [(decoder.child("key", key), decoder.child("item", item)) for key, item in pairs]
    decoder.enclosing.pop()
    # A member of an enumeration or a named tuple, if its class is imported by now.
    member, named_tuple = member_for(value), named_tuple_for(value)
    return member if member is not None else value if named_tuple is None else named_tuple


def _encode_enclosing(value: ForeignObject, encoder: ValueEncoder) -> Json:
    outwards = enumerate(reversed(encoder.enclosing), 1)
    return next(level for level, enclosing in outwards if enclosing is value)


def _decode_enclosing(tree: Json, decoder: ValueDecoder) -> ForeignObject:
    level = integer_of(tree)
    if not 1 <= level <= len(decoder.enclosing):
        raise ValueError(f"there are {len(decoder.enclosing)} objects around it")
    return decoder.enclosing[-level]


def named_tuple_for(value: ForeignObject) -> tuple[Any, ...] | None:
    """Return the named tuple of an imported class that an object of a pickle stands for; None if none."""
    is_only_made = not value.is_called and value.state is None and not value.items
    return named_tuple_of(value.module, value.qualname, value.args) if is_only_made else None


def member_for(value: ForeignObject) -> enum.Enum | None:
    """Return the member of an imported enumeration that an object of a pickle stands for; None if none."""
    is_only_called = value.is_called and len(value.args) == 1 and value.state is None and not value.items
    if not is_only_called or type(value.args[0]) not in PLAIN_VALUE_CLASSES:
        return None
    cls = imported_enum(value.module, value.qualname)
    return None if cls is None else member_of_value(cls, value.args[0])


def as_stand_in(value: object, encoder: ValueEncoder) -> object:
    """Return the stand-in that a pickle of a value loads as in a process without its class.

    That is a ForeignObject for a member with a plain value and for a named tuple: their pickles contain no
    names of members and fields. Any other value is returned unchanged.

    Raises:
        UnserializableError: a load would not return an equal named tuple.
    """
    if isinstance(value, ForeignNamedTuple):
        return ForeignObject(value.module, value.qualname, value.values, is_called=False)
    cls = type(value)
    if isinstance(value, tuple) and not isinstance(value, enum.Enum) and named_fields(cls) is not None:
        _check_named_tuple(value, encoder)
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
        raise ValueError(f"{name[:80]!r} is not the name of a module or class")
    return name


MEMBER = Kind("$enum", (ForeignMember,), _encode_member, _decode_member)
"""Encodes members of all enumerations, and their stand-ins."""
NAMED_TUPLE = Kind("$namedtuple", (ForeignNamedTuple,), _encode_named_tuple, _decode_named_tuple)
"""Encodes named tuples of all classes, and their stand-ins."""
ENCLOSING = Kind("$enclosing", (), _encode_enclosing, _decode_enclosing)
"""Encodes a reference of a stand-in to one that it is inside of, such as a link to its parent."""

KINDS = (
    MEMBER,
    ENCLOSING,
    NAMED_TUPLE,
    Kind("$name", (ForeignName,), _encode_name, _decode_name),
    Kind("$foreign", (ForeignObject,), _encode_object, _decode_object),
)
