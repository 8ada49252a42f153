"""Values that tests of the codec share, and classes that note when their code runs."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Callable

import pytest
import torch

from megackpt.codec import pack, unpack

TORCH_DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    ),
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),  # from torch 2.7 on
]


class Color(enum.Enum):
    RED = "r"
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str]


class Point(typing.NamedTuple):
    x: int
    y: torch.Tensor


ran: list[str] = []
"""What code of watched classes and modules has run; tests clear it."""


class WatchingMeta:
    """To be mixed into a metaclass: notes each attribute that is read from a class, and each call of it."""

    def __getattribute__(cls, name: str) -> typing.Any:
        ran.append(f"class.{name}")
        return super().__getattribute__(name)

    def __call__(cls, *args: typing.Any, **more: typing.Any) -> typing.Any:
        ran.append("call")
        return super().__call__(*args, **more)  # type: ignore[misc]


class _WatchingModule(types.ModuleType):
    def __getattribute__(self, name: str) -> typing.Any:
        ran.append(f"module.{name}")
        return super().__getattribute__(name)


def import_watching_module(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    """Put `watching_module` with these classes among the imported ones; it notes what is read from it."""
    module = _WatchingModule("watching_module")
    for name, cls in classes.items():
        setattr(module, name, cls)
    module.__getattr__ = lambda name: ran.append(f"getattr {name}")
    monkeypatch.setitem(sys.modules, "watching_module", module)
    ran.clear()


def round_trip(value: object) -> object:
    """Return what comes back from a blob."""
    return unpack(pack(value), where="blob")


def recursive_list() -> list[object]:
    """Return a list that contains itself."""
    value: list[object] = [1]
    value.append({"again": value})
    return value


def nested(levels: int, wrap: Callable[[object], object]) -> object:
    """Return 1 inside of so many levels of a container."""
    value: object = 1
    for _ in range(levels):
        value = wrap(value)
    return value
