"""Values for tests of the codec: classes that note when their code runs, and keys with equal hashes."""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch

from megackpt.codec import pack, unpack

TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
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


P = 2**61 - 1
"""Integers that differ by multiples of it have one hash. Source: sys.hash_info.modulus."""

_P1, _P2, _P5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
_WORD = 2**64


@cache
def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Return pairs of small integers with one hash.

    Source: CPython, `tuplehash` of tupleobject.c.
    """
    wanted, inverse = 12345, pow(_P2, -1, _WORD)
    pairs: list[tuple[int, int]] = []
    first = 0
    while len(pairs) < count:
        first += 1
        state = (_P5 + first * _P2) % _WORD
        state = (state << 31 | state >> 33) * _P1 % _WORD
        second = (wanted - state) * inverse % _WORD
        second -= _WORD if second >= _WORD // 2 else 0
        if abs(second) < P and second not in (-1, -2):
            pairs.append((first, second))
    return pairs


@cache
def integers_that_crowd_a_table(count: int) -> list[int]:
    """Return different integers, half of which find hundreds of slots taken by the others.

    The first half are the slots that Python tries one after another, when a key has no other bits left; the
    second half come into that sequence near its start.

    Source: CPython, `lookdict` of dictobject.c.
    """
    size = _table_size(count)
    sequence = [1]
    while len(sequence) < count // 2:
        sequence.append((sequence[-1] * 5 + 1) % size)
    taken, is_early = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
    taken[sequence] = True
    is_early[sequence[: count // 6]] = True
    later: list[int] = []
    multiple = 0
    while len(later) < count - len(sequence):
        multiple += 1
        hashes = np.array(sequence, np.uint64) + np.uint64(multiple * size)
        slot, rest = hashes % size, hashes.copy()
        is_taken = taken[slot]
        while rest.any():
            rest >>= np.uint64(5)
            slot = (slot * np.uint64(5) + rest + np.uint64(1)) % np.uint64(size)
            is_taken &= taken[slot]
        later += hashes[is_taken & is_early[slot]].tolist()
    return sequence + later[: count - len(sequence)]


def _table_size(count: int) -> int:
    """Return the size of a dict to which so many keys were added."""
    size = 8
    while size * 2 // 3 < count:
        size = 1 << (size * 2 // 3 * 3 - 1).bit_length()
    return size
