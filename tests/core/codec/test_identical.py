"""The strict comparison that the round-trip tests rely on."""

from __future__ import annotations

import collections
import math
import struct

import numpy as np
import pytest
import torch

from megackpt.testing.identical import difference

OTHER_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (math.nan, OTHER_NAN),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        ([1], (1,)),
        ([1], [1, 2]),
        ({1: "a"}, {True: "a"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, {1, 3}),
        ({1}, {True}),
        (collections.deque([1], 2), collections.deque([1], 3)),
        (collections.defaultdict(int), collections.defaultdict(list)),
        (slice(1, 2), slice(True, 2)),
        (torch.zeros(1), torch.zeros(1, dtype=torch.float16)),
        (torch.zeros(1), torch.zeros(1, 1)),
        (torch.zeros(1), -torch.zeros(1)),
        (np.zeros(1, ">f4"), np.zeros(1, "<f4")),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    ],
)
def test_a_difference_of_class_or_bits_is_found_at_any_depth(first: object, second: object) -> None:
    assert difference(first, second) is not None
    assert difference([{"x": (first,)}], [{"x": (second,)}], path="v").startswith("v[0]['x'][0]")
    assert difference([{"x": (first,)}], [{"x": (first,)}]) is None


def test_sets_are_compared_without_regard_to_their_order_in_memory() -> None:
    first = {frozenset({str(i), i}) for i in range(40)}
    second = {frozenset({i, str(i)}) for i in reversed(range(40))}
    assert difference(first, second) is None
