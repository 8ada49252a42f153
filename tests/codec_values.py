"""Values that tests of the codec share, and the way there and back."""

from __future__ import annotations

import dataclasses
import enum
import typing
from collections.abc import Callable

import torch

from megackpt.codec import pack, unpack


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
