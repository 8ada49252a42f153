"""Classes of users: what register_codec accepts, and how their values are saved and loaded."""

from __future__ import annotations

import dataclasses
import enum
import typing

import pytest
import torch

from megackpt.codec import dump_tree, encode, pack, unpack
from megackpt.codec.kinds import REGISTRY
from megackpt.codec.registration import register_codec
from megackpt.errors import DeclarationError, FormatError, UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import Color, Config, Level, Point, round_trip


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass
class Derived:
    a: int
    b: int = dataclasses.field(init=False, default=0)


class Opaque:
    def __init__(self, inside: object) -> None:
        self.inside = inside


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts and ends with no codec registered."""
    monkeypatch.setattr(REGISTRY, "_by_class", {})
    monkeypatch.setattr(REGISTRY, "_by_name", {})


def test_a_registered_class_survives_with_what_is_inside() -> None:
    register_codec(
        Opaque, "test.Opaque", lambda value: {"inside": value.inside}, lambda saved: Opaque(saved["inside"])
    )
    loaded = round_trip([Opaque({"w": torch.ones(2), "deeper": Opaque((1, 2))})])[0]
    assert type(loaded) is Opaque
    assert loaded.inside["w"].tolist() == [1, 1]
    assert loaded.inside["deeper"].inside == (1, 2)
    assert dump_tree(encode(Opaque(1)).tree) == '{"$registered":{"name":"test.Opaque","value":{"inside":1}}}'


@pytest.mark.parametrize(
    "value",
    [Color.GREEN, Mode.READ | Mode.WRITE, Mode(0), Level.LOW, Config(0.5, ["a"]), Point(1, torch.ones(2))],
)
def test_enums_dataclasses_and_named_tuples_need_no_functions(value: object) -> None:
    register_codec(type(value), "test.Class")
    assert difference(round_trip([value]), [value]) is None


def test_registered_values_can_be_keys() -> None:
    register_codec(Color, "test.Color")
    assert round_trip({Color.RED: {Color.GREEN}}) == {Color.RED: {Color.GREEN}}


def test_a_class_and_a_name_belong_to_each_other() -> None:
    register_codec(Color, "test.Color")
    register_codec(Color, "test.Color")  # again, as when a module is reloaded
    with pytest.raises(DeclarationError, match=r"'test.Color' already belongs to .*Color.*Choose a name"):
        register_codec(Mode, "test.Color")
    with pytest.raises(
        DeclarationError, match=r"Color is already registered as 'test.Color'.*under one name"
    ):
        register_codec(Color, "test.Colour")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Opaque, "x"), r"register_codec of .*Opaque needs encode and decode.*Give both"),
        ((Derived, "x"), r"register_codec of .*Derived needs encode and decode"),
        ((Config, "x", vars), r"Config needs encode and decode"),
        ((dict, "x", dict, dict), r"dict has a codec already.*a class of your own"),
        ((list, "x", list, list), r"list has a codec already"),
        (
            (Opaque, "", vars, Opaque),
            r"Opaque got the name ''\. Give a text that will never change, such as '.*Opaque'",
        ),
        ((Opaque(1), "x", vars, Opaque), r"which is not a class\. Give the class"),
    ],
)
def test_impossible_registrations_are_rejected(arguments: tuple[typing.Any, ...], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        register_codec(*arguments)


def test_an_encode_function_that_raises_is_named_with_the_path() -> None:
    register_codec(Opaque, "test.Opaque", lambda value: 1 / 0, Opaque)
    with pytest.raises(
        UnserializableError, match=r"^a\.b: The encode function of codec 'test.Opaque' raised Zero.*Correct"
    ):
        encode({"a": {"b": Opaque(1)}})


def test_an_encode_function_that_returns_its_argument_does_not_hang() -> None:
    register_codec(Opaque, "test.Opaque", lambda value: value, Opaque)
    with pytest.raises(UnserializableError, match="contains itself"):
        encode(Opaque(1))


def test_a_decode_function_that_raises_is_named_with_the_path() -> None:
    register_codec(Config, "test.Config", vars, lambda saved: Config(saved["gone"], []))
    blob = pack({"a": [Config(1.0, [])]})
    with pytest.raises(
        FormatError,
        match=r"f: a\[0\]: the decode function of codec 'test.Config' raised KeyError.*both forms",
    ):
        unpack(blob, where="f")


def test_an_unknown_registered_name_is_an_error_with_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    register_codec(Color, "test.Color")
    blob = pack({"a": [Color.RED]})
    monkeypatch.setattr(REGISTRY, "_by_name", {})
    message = (
        r"^file 3: a\[0\]: saved with the codec 'test.Color', which is not registered.*Import the module"
    )
    with pytest.raises(FormatError, match=message) as caught:
        unpack(blob, where="file 3")
    assert caught.value.path == "file 3"
