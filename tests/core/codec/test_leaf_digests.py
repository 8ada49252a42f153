"""Digests of leaves: what tells two values apart, and under which names."""

from __future__ import annotations

import argparse
import collections
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megackpt.codec import leaf_digests
from megackpt.errors import UnserializableError
from tests.support.codec import recursive_list


def test_leaves_are_named_by_their_path() -> None:
    value = {"args": argparse.Namespace(lr=0.1, betas=(1, 2)), "w": [torch.zeros(2), {"a.b": {}, 3: []}]}
    assert list(leaf_digests(value)) == ["args.lr", "args.betas", "w[0]", "w[1]['a.b']", "w[1][3]"]
    assert list(leaf_digests(5)) == ["(top level)"]
    assert list(leaf_digests([5], path="common")) == ["common[0]"]
    assert list(leaf_digests({"a": SimpleNamespace(x=1)})) == ["a.x"]


def test_key_order_does_not_matter_at_any_depth() -> None:
    first = {
        "a": 1,
        "b": ({"c": torch.zeros(1), "d": torch.ones(1)}, {1: 2, "x": {4, 5}}),
        "e": argparse.Namespace(f=1, g=2),
    }
    second = {
        "e": argparse.Namespace(g=2, f=1),
        "b": ({"d": torch.ones(1), "c": torch.zeros(1)}, {"x": {5, 4}, 1: 2}),
        "a": 1,
    }
    assert leaf_digests(first) == leaf_digests(second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("1", 1),
        ((1,), [1]),
        ({"a": 1}, argparse.Namespace(a=1)),
        ({"a": 1}, SimpleNamespace(a=1)),
        ([1], {0: 1}),
        ({}, []),
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({1: 1}, {"1": 1}),
        (collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(2), np.zeros(2, np.float32)),
    ],
)
def test_any_difference_of_class_or_bits_shows(first: object, second: object) -> None:
    assert leaf_digests({"x": first}) != leaf_digests({"x": second})


def test_the_digest_is_the_same_in_every_process_and_release() -> None:
    assert leaf_digests({"lr": 0.1}) == {"lr": "3fe5b2b0b3e27dcb3b0b7442d31eab99"}


def test_a_leaf_without_codec_is_named() -> None:
    with pytest.raises(UnserializableError, match=r"^c\.a\[0\]\[0\]: A value of type object"):
        leaf_digests({"a": [(object(),)]}, path="c")


def test_leaves_of_endless_values_raise_an_error() -> None:
    with pytest.raises(UnserializableError, match=r"nested more than 64 levels deep, or contain themselves"):
        leaf_digests(recursive_list())
