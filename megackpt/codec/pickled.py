"""Stand-ins for objects in pickles, and their codecs.

Readers of pickles import this module, and a decoder that meets one of the tags. So the encoder and the
decoder know these kinds exactly where there can be such values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from megackpt.codec.kinds import (
    Kind,
    ValueDecoder,
    ValueEncoder,
    add_kinds,
    dotted_of,
    fields_of,
    integer_of,
    list_of,
)
from megackpt.codec.members import (
    check_named_tuple,
    imported_enum,
    items_of,
    member_fields,
    member_of_value,
    named_fields,
    named_tuple_of,
)
from megackpt.codec.stand_ins import PLAIN_VALUE_CLASSES, ForeignMember, ForeignNamedTuple, Unpicklable
from megackpt.codec.tree import Json


@dataclass(slots=True, eq=False)
class ForeignShardedTensor(Unpicklable):
    """Stands for a ShardedTensor of torch in a pickle, as of FSDP version 1. It is never written back.

    Attributes:
        state: what its `__getstate__` returned, with stand-ins for objects; None if there is none.
    """

    state: Any  # Any: whatever somebody pickled


@dataclass(slots=True, eq=False)
class ForeignObject(Unpicklable):
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


def _encode_object(value: ForeignObject, encoder: ValueEncoder) -> Json:
    encoder.count(value, f"this {value.module}.{value.qualname}")
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
    value = ForeignObject(dotted_of(module), dotted_of(qualname), decoded_args, is_called)
    decoder.enclosing.append(value)
    value.state = decoder.child("state", state)
    value.items += [(decoder.child("key", key), decoder.child("item", item)) for key, item in pairs]
    decoder.enclosing.pop()
    # A member of an enumeration or a named tuple, if its class is imported by now.
    member, named_tuple = member_for(value), named_tuple_for(value)
    return member if member is not None else value if named_tuple is None else named_tuple


def _decode_enclosing(tree: Json, decoder: ValueDecoder) -> ForeignObject:
    level = integer_of(tree)
    if not 1 <= level <= len(decoder.enclosing):
        raise ValueError(f"there are {len(decoder.enclosing)} objects around it")
    enclosing: ForeignObject = decoder.enclosing[-level]
    return enclosing


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
        check_named_tuple(value, encoder)
        return ForeignObject(cls.__module__, cls.__qualname__, items_of(value), is_called=False)
    if isinstance(value, ForeignMember):
        module, qualname, plain = value.module, value.qualname, value.value
    elif isinstance(value, enum.Enum):
        module, qualname = type(value).__module__, type(value).__qualname__
        plain = member_fields(value)[1]
    else:
        return value
    return value if plain is None else ForeignObject(module, qualname, (plain,), is_called=True)


def _never_encoded(value: object, encoder: ValueEncoder) -> Json:
    raise AssertionError(
        "no value is of this kind: the encoder writes a reference for an object that it is in"
    )


KINDS = (
    Kind("$enclosing", (), _never_encoded, _decode_enclosing),
    Kind("$foreign", (ForeignObject,), _encode_object, _decode_object),
)

add_kinds(KINDS)
