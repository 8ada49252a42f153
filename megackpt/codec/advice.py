"""Why a value cannot be saved, and what its owner can do about it.

Owns the wording for values without a codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container

import torch


def why_not(value: object, *, known: Container[type]) -> str:
    """Say why there is no codec for a value, and what to do. known are the classes that have one."""
    cls = type(value)
    name = name_of(cls)
    call = f"megackpt.register_codec({cls.__name__}, {name!r}"
    register = f"register it before saving and before loading: {call}, encode, decode)"
    if isinstance(value, torch.Tensor):
        return (
            f"A {name} is a tensor with a meaning of its own. Save value.detach() if that is a plain "
            f"tensor, or declare it as sharded."
        )
    if dataclasses.is_dataclass(value):
        return (
            f"{name} is a dataclass that is not registered. To make one, a load would have to run its "
            f"__init__ and __post_init__, or leave out what they check and derive. Save plain values, or "
            f"register it before saving and before loading: {call})."
        )
    base = next((base for base in cls.__mro__[1:] if base in known), None)
    if base is not None:
        return (
            f"{name} is a subclass of {base.__name__}, and saved as such it would lose its class. Save "
            f"{base.__name__}(value), or {register}."
        )
    if callable(value):
        return (
            f"{value!r} is code (a {name}), which is never saved. Leave it out and make it anew after "
            f"loading, or {register}."
        )
    return (
        f"A value of type {name} has no codec, and nothing is ever pickled. Save plain values instead, or "
        f"{register}."
    )


def name_of(cls: type) -> str:
    """Return the name of a class as a user would write it."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
