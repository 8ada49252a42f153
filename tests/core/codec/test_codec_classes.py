"""Classes of users: enumerations, stand-ins of what is not imported, and codecs that users register."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import enum
import signal
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.codec import (
    EncodedValue,
    decode,
    dump_tree,
    encode,
    keep_unknown_values,
    leaf_digests,
    pack,
    unpack,
)
from megackpt.codec.kinds import REGISTRY
from megackpt.codec.pickled import ForeignObject
from megackpt.codec.registration import register_codec
from megackpt.codec.stand_ins import ForeignMember, ForeignName
from megackpt.errors import DeclarationError, FormatError, UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import (
    Color,
    Config,
    Level,
    Point,
    WatchingMeta,
    import_watching_module,
    ran,
    round_trip,
)


class Scope(str, enum.Enum):
    ATTN = "attn"
    ATTENTION = "attn"
    MLP = "mlp"


class Parts(enum.Flag):
    A = 1
    B = 2
    C = 4


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Nothing(enum.Enum):
    UNSAVED = object()


class Outer:
    class Inner(enum.Enum):  # noqa: D106
        X = (1, 2)


HERE = __name__
MEMBERS = [
    Color.RED, Level.LOW, Scope.ATTENTION, Parts.A, Parts.A | Parts.C, Parts(0), Bits.A | Bits.B,
    Nothing.UNSAVED, Outer.Inner.X, signal.SIGTERM,
]  # fmt: skip


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_a_member_loads_as_itself(member: enum.Enum) -> None:
    assert round_trip(member) is member
    assert round_trip({member: [member], "set": {member}}) == {member: [member], "set": {member}}


def test_a_member_is_stored_by_its_canonical_name_with_a_plain_value() -> None:
    names = {"module": HERE, "class": "Scope", "name": "ATTN", "value": "attn"}
    assert encode(Scope.ATTENTION).tree == {"$enum": names}
    inner = {"module": HERE, "class": "Outer.Inner", "name": "X", "value": None}
    assert encode(Outer.Inner.X).tree == {"$enum": inner}


def test_a_class_that_has_a_codec_keeps_it() -> None:
    class Mine(enum.Enum):
        ONE = 1

    megackpt.register_codec(Mine, f"{HERE}.Mine")
    assert encode(Mine.ONE).tree == {"$registered": {"name": f"{HERE}.Mine", "value": "ONE"}}


def _tree(**fields: Any) -> Any:
    return {"$enum": {"module": HERE, "class": "Scope", "name": "MLP", "value": "mlp", **fields}}


@pytest.mark.parametrize(
    "tree",
    [
        _tree(module="nowhere.at.all"),
        _tree(**{"class": "Other"}),
        _tree(**{"class": "Outer"}),  # no enumeration
        _tree(**{"class": "Outer.Missing"}),
        _tree(**{"class": "HERE"}),  # no class
        _tree(name="GONE"),
        _tree(module="os", **{"class": "system"}),
        _tree(module="enum", **{"class": "Enum"}),
        _tree(**{"class": "Parts"}, name=None, value=8),  # no such flag
        _tree(**{"class": ""}),
    ],
)
def test_a_member_that_is_not_imported_is_a_stand_in_that_is_saved_unchanged(tree: Any) -> None:
    decoded = decode(EncodedValue(tree, ()))
    assert isinstance(decoded, ForeignMember)
    assert decoded == decode(EncodedValue(tree, ()))
    assert {decoded: 1}[decode(EncodedValue(tree, ()))] == 1
    assert encode(decoded).tree == tree
    assert leaf_digests([decoded]) == leaf_digests([decode(EncodedValue(tree, ()))])


def test_a_stand_in_shows_and_compares_name_and_value() -> None:
    decoded = decode(EncodedValue(_tree(module="elsewhere"), ()))
    assert repr(decoded) == "<elsewhere.Scope.MLP: 'mlp'>"
    assert decoded != decode(EncodedValue(_tree(module="elsewhere", name="ATTN"), ()))
    assert decoded != decode(EncodedValue(_tree(module="elsewhere", value="attn"), ()))


def test_the_name_decides_where_the_value_has_changed() -> None:
    assert decode(EncodedValue(_tree(value="another"), ())) is Scope.MLP


@pytest.mark.parametrize(
    "payload",
    [
        None, [], {}, {"module": HERE}, {"module": 1, "class": "Scope", "name": "MLP", "value": None},
        {"module": HERE, "class": "Scope", "name": 1, "value": None},
        {"module": HERE, "class": "Scope", "name": "MLP", "value": [1]},
        {"module": HERE, "class": "Scope", "name": "MLP", "value": None, "more": 1},
    ],
)  # fmt: skip
def test_a_malformed_member_is_an_error(payload: Any) -> None:
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode(EncodedValue({"$enum": payload}, ()))


class _WatchingEnumMeta(WatchingMeta, enum.EnumMeta):
    pass


class Watched(enum.Flag, metaclass=_WatchingEnumMeta):
    ONE = 1
    TWO = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        ran.append("missing")
        return super()._missing_(value)

    def __eq__(self, other: object) -> bool:
        ran.append("eq")
        return self is other

    def __hash__(self) -> int:
        ran.append("hash")
        return 1


def test_no_code_of_a_class_or_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "no_module", Watched.ONE)  # type: ignore[arg-type]
    import_watching_module(monkeypatch, Watched=Watched)
    members = [
        decode(EncodedValue({"$enum": {"module": where, "class": name, "name": of, "value": 3}}, ()))
        for where in ("watching_module", "no_module")
        for name, of in (("Watched", "ONE"), ("Watched", None), ("Missing", "ONE"), ("Watched.ONE", "ONE"))
    ]
    assert ran == []
    assert members[0] is Watched.ONE
    assert all(type(value) is ForeignMember for value in members[1:])


def test_nothing_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "could_be_imported.py").write_text("import enum\nclass Scope(enum.Enum):\n    MLP = 'mlp'\n")
    monkeypatch.syspath_prepend(tmp_path)
    decoded = decode(EncodedValue(_tree(module="could_be_imported"), ()))
    assert repr(decoded) == "<could_be_imported.Scope.MLP: 'mlp'>"
    assert "could_be_imported" not in sys.modules


class Net(torch.nn.Module):
    class Head(torch.nn.Module):  # noqa: D106
        pass


class Sgd(torch.optim.SGD):
    pass


class _WatchingTypeMeta(WatchingMeta, type):
    def __eq__(cls, other: object) -> bool:
        ran.append("eq")
        return cls is other

    def __hash__(cls) -> int:
        ran.append("hash")
        return 1


class Watching(torch.optim.SGD, metaclass=_WatchingTypeMeta):
    pass


RETURNED = [torch.optim.AdamW, Sgd, Scope, Parts, int, dict, torch.Tensor, torch.nn.Parameter]
NAMED = [Net, Net.Head, torch.nn.Linear, torch.FloatTensor, argparse.Namespace, WatchingMeta]


@pytest.mark.parametrize("cls", [*RETURNED, *NAMED])
def test_a_class_is_saved_as_its_name_and_returned_if_it_is_on_the_list(cls: type) -> None:
    encoded = encode({"cls": cls})
    assert encoded.tree == {"cls": {"$name": {"module": cls.__module__, "class": cls.__qualname__}}}
    name = ForeignName(cls.__module__, cls.__qualname__)
    loaded = decode(encoded)["cls"]
    assert loaded is cls if cls in RETURNED else loaded == name
    with keep_unknown_values():
        assert decode(encoded)["cls"] == name
    assert encode({"cls": name}).tree == encoded.tree
    assert leaf_digests([cls]) == leaf_digests([name])


def test_a_class_that_the_user_has_allowed_is_returned() -> None:
    with torch.serialization.safe_globals([Net]):
        assert decode(encode(Net)) is Net
    assert decode(encode(Net)) == ForeignName(HERE, "Net")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("os", "_Environ"),
        ("subprocess", "Popen"),
        ("nowhere.at.all", "AdamW"),
        (HERE, "HERE"),
    ],
)
def test_a_name_of_anything_else_stays_a_name_that_can_be_copied(module: str, name: str) -> None:
    loaded = decode(EncodedValue([{"$name": {"module": module, "class": name}}], ()))
    assert loaded == copy.deepcopy(loaded) == [ForeignName(module, name)]  # optimizers copy their groups
    assert repr(loaded) == f"[<{module}.{name}>]"


def test_no_code_of_a_metaclass_runs_when_a_class_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import_watching_module(monkeypatch, Watching=Watching)
    names = [{"$name": {"module": "watching_module", "class": name}} for name in ("Watching", "Missing")]
    loaded = [decode(EncodedValue(name, ())) for name in names]
    assert ran == []
    assert loaded[0] is Watching
    assert loaded[1] == ForeignName("watching_module", "Missing")


OBJECT = ForeignObject(
    "lib.config", "Config", (ForeignName("lib", "make"), 1), True, {"lr": torch.ones(2)}, [("key", (1, 2))]
)


def test_a_stand_in_of_an_object_is_saved_unchanged() -> None:
    encoded = encode({"config": OBJECT})
    decoded = decode(encoded)["config"]
    assert (decoded.module, decoded.qualname, decoded.args) == ("lib.config", "Config", OBJECT.args)
    assert decoded.is_called
    assert decoded.items == OBJECT.items
    assert difference(decoded.state, OBJECT.state) is None
    assert encode({"config": decoded}).tree == encoded.tree


def test_an_object_that_stands_for_a_member_becomes_the_member() -> None:
    stands = ForeignObject(HERE, "Scope", ("mlp",), True)
    assert round_trip(stands) is Scope.MLP
    unknown = round_trip(ForeignObject(HERE, "Scope", ("gone",), True))
    assert isinstance(unknown, ForeignObject)


@pytest.mark.parametrize("name", ["", "a..b", "a b", "a\nb", ".a", 1])
def test_names_of_stand_ins_are_identifiers(name: Any) -> None:
    tree = encode(OBJECT).tree
    assert isinstance(tree, dict)
    payload = {**tree["$foreign"], "class": name}  # type: ignore[dict-item]
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode(EncodedValue({"$foreign": payload}, encode(OBJECT).tensors))


def test_a_member_without_a_name_and_a_plain_value_is_an_error() -> None:
    class Odd(enum.Enum):
        X = (1, 2)

    Odd.X._name_ = "Y"
    with pytest.raises(UnserializableError, match=r"^args\.x: .* neither a name nor a plain value"):
        encode({"args": argparse.Namespace(x=Odd.X)})


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
    message = r"^a\.b: The encode function of codec 'test.Opaque' raised Zero.*Correct"
    with pytest.raises(UnserializableError, match=message):
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
