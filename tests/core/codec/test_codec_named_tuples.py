"""Named tuples load as themselves where their class is imported, else as stand-ins."""

from __future__ import annotations

import collections
import enum
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.codec import EncodedValue, ForeignNamedTuple, decode, encode, keep_unknown_values, leaf_digests
from megackpt.errors import FormatError, UnknownClassError, UnserializableError
from megackpt.formats.safe_pickle import load_value, save_value
from megackpt.testing.identical import difference
from tests.support.codec import Point, WatchingMeta, import_watching_module, ran, round_trip
from tests.system.attacks.opcodes import named, pickled, zipped

T = typing.TypeVar("T")


class Caller(typing.NamedTuple):
    message: str
    rank: int = 0


class Call(typing.NamedTuple):
    caller: Caller
    sequence: int

    def described(self) -> str:
        return f"{self.caller.message} {self.sequence}"


if sys.version_info >= (3, 11):

    class Box(typing.NamedTuple, typing.Generic[T]):
        item: T

else:  # where a named tuple cannot be generic

    class Box(typing.NamedTuple):
        item: Any


Plain = collections.namedtuple("Plain", "a b")
Empty = collections.namedtuple("Empty", "")


class Checked(collections.namedtuple("Checked", "low high")):
    __slots__ = ()

    def __new__(cls, low: int, high: int) -> Checked:
        ran.append("new")
        return super().__new__(cls, low, high)


class Loose(Caller):
    pass


class Renamed(typing.NamedTuple):
    value: int


Renamed.__qualname__ = "Other"


class Equal(typing.NamedTuple):
    value: int

    def __eq__(self, other: object) -> bool:
        ran.append("eq")
        return True

    __hash__ = tuple.__hash__


class Dropped(typing.NamedTuple):
    value: int

    def __del__(self) -> None:
        ran.append("del")


class Corner(Plain, enum.Enum):
    LEFT = 1, 2


class NoTuple:
    _fields = ("a", "b")


class OddFields(tuple):
    _fields = "ab"


HERE = __name__
CALL = Call(Caller("loss", 3), 7)
VALUES = [
    CALL, Caller("x"), Point(1, torch.arange(3.0)), Box([1, {"a": torch.ones(2)}]), Plain(1, (2, 3)), Empty(),
    Checked(1, 2), Loose("message", 2),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_named_tuple_loads_as_itself(value: Any) -> None:
    assert difference(round_trip({"v": [value]}), {"v": [value]}) is None
    assert difference(load_value(save_value([value], path="v"), where="w"), [value]) is None


def test_named_tuples_can_be_keys_and_contain_other_values() -> None:
    counts = {Caller("loss", 1): [CALL], (Caller("grad"), 1): {Caller("set")}}
    for result in (round_trip(counts), load_value(save_value(counts, path="v"), where="w")):
        assert difference(result, counts) is None
    assert round_trip(Box(Corner.LEFT)) == (Corner.LEFT,)


def test_a_named_tuple_is_stored_by_module_class_and_fields() -> None:
    fields = [["message", "loss"], ["rank", 3]]
    assert encode(CALL.caller).tree == {"$namedtuple": {"module": HERE, "class": "Caller", "fields": fields}}


def test_a_class_that_has_a_codec_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(typing.NamedTuple):
        value: object

    monkeypatch.setattr(sys.modules[HERE], "Mine", Mine, raising=False)
    megackpt.register_codec(Mine, f"{HERE}.Mine", lambda instance: 5, lambda value: Mine(value))
    encoded = {"$registered": {"name": f"{HERE}.Mine", "value": 5}}
    assert encode(Mine(len)).tree == encoded
    assert leaf_digests([Mine(len)]) == leaf_digests([Mine(max)])


class Local:
    class Inner(typing.NamedTuple):  # noqa: D106
        value: int


def _local() -> Any:
    class Hidden(typing.NamedTuple):
        value: int

    return Hidden(1)


def _with_attribute() -> Any:
    value = Loose("m", 1)
    value.more = 2  # type: ignore[attr-defined]
    return value


UNSUPPORTED = [
    (_local(), r"_local\.<locals>\.Hidden is a named tuple .*: its class cannot be found by this name"),
    (_with_attribute(), r"Loose is a named tuple .*: it has attributes besides its fields: more"),
    (Renamed(1), r"Other is a named tuple .* cannot be found"),
    (Equal(1), r"Equal is a named tuple .*: its class defines one of __hash__, __eq__, .*, which a load"),
    (tuple.__new__(Caller, (1, 2, 3)), r"it has 3 items, and its _fields are \('message', 'rank'\)"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "why"), UNSUPPORTED, ids=lambda value: type(value).__name__)
def test_a_named_tuple_that_would_load_as_another_value_is_an_error(value: Any, why: str) -> None:
    for function in (encode, leaf_digests):
        with pytest.raises(UnserializableError, match=rf"^args\.x: .*{why}.*register_codec\("):
            function({"args": types.SimpleNamespace(x=value)})
    with pytest.raises(UnserializableError, match=r"named tuple|cannot be pickled|does not load"):
        save_value(value, path="args")


def test_a_class_inside_of_another_is_found() -> None:
    assert difference(round_trip(Local.Inner(1)), Local.Inner(1)) is None


def _tree(name: str = "Caller", fields: Any = (("message", "a"), ("rank", 1)), module: str = HERE) -> Any:
    return {"$namedtuple": {"module": module, "class": name, "fields": [list(pair) for pair in fields]}}


PAIR = (("low", 1), ("high", 2))
ELSEWHERE = [
    _tree(module="nowhere.at.all"),
    _tree("Missing"),
    _tree(fields=(("message", "a"),)),
    _tree(fields=(("rank", 1), ("message", "a"))),
    _tree(fields=(("message", "a"), ("rank", 1), ("more", 2))),
    _tree("NoTuple", (("a", 1), ("b", 2))),
    _tree("OddFields", (("a", 1), ("b", 2))),
    _tree("Corner", (("a", 1), ("b", 2))),  # a member would be made
    _tree("Equal", (("value", 1),)),
    _tree("Dropped", (("value", 1),)),
    _tree("HERE"),
    _tree("system", (), module="os"),
    _tree("tuple", (), module="builtins"),
]


@pytest.mark.parametrize("tree", ELSEWHERE, ids=str)
def test_a_named_tuple_that_is_not_imported_is_a_stand_in_that_is_saved_unchanged(tree: Any) -> None:
    ran.clear()
    decoded, again = decode(EncodedValue(tree, ())), decode(EncodedValue(tree, ()))
    assert isinstance(decoded, ForeignNamedTuple)
    assert decoded == again
    assert {decoded: 1}[again] == 1
    assert encode(decoded).tree == tree
    assert leaf_digests([decoded]) == leaf_digests([again])
    assert ran == []


def test_a_stand_in_shows_and_compares_its_fields() -> None:
    decoded = decode(EncodedValue(_tree(module="elsewhere"), ()))
    assert repr(decoded) == "<elsewhere.Caller(message='a', rank=1)>"
    other_message = _tree(module="elsewhere", fields=(("message", "b"), ("rank", 1)))
    assert decoded != decode(EncodedValue(other_message, ()))
    assert decoded != decode(EncodedValue(_tree(module="elsewhere", fields=(("text", "a"), ("rank", 1))), ()))


MALFORMED = [
    None,
    [],
    {"module": HERE, "class": "Caller"},
    {"module": 1, "class": "Caller", "fields": []},
    {"module": HERE, "class": "Caller", "fields": {"message": 1, "rank": 2}},
    {"module": HERE, "class": "Caller", "fields": [["message"]]},
    {"module": HERE, "class": "Caller", "fields": [[1, 2]]},
    {"module": HERE, "class": "Caller", "fields": [["a", 1], ["a", 2]]},
    {"module": HERE, "class": "Caller", "fields": [], "more": 1},
]


@pytest.mark.parametrize("payload", MALFORMED, ids=str)
def test_a_malformed_named_tuple_is_an_error(payload: Any) -> None:
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode(EncodedValue({"$namedtuple": payload}, ()))


class _WatchingType(WatchingMeta, type):
    pass


class Watched(Plain, metaclass=_WatchingType):
    def __new__(cls, *values: int) -> Watched:
        ran.append("new")
        return super().__new__(cls, *values)

    def __iter__(self) -> Iterator[int]:
        ran.append("iter")
        return super().__iter__()

    def __len__(self) -> int:
        ran.append("len")
        return 2


def test_no_code_of_a_class_or_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import_watching_module(monkeypatch, Watched=Watched)
    trees = [
        _tree(name, (("a", 1), ("b", 2)), module="watching_module")
        for name in ("Watched", "Missing", "Watched.x")
    ]
    decoded = [decode(EncodedValue({"$dict": [[tree, 1]]}, ())) for tree in trees]
    assert ran == []
    made = next(iter(decoded[0]))
    assert type(made) is Watched
    ran.clear()
    state = load_value(zipped(pickled(named("watching_module", "Watched"), b"K\x01K\x02\x86\x81")), where="w")
    assert ran == []
    assert type(state) is Watched


ONE, TWO, NEW, CALLED = b"K\x01", b"K\x02", b"\x81", b"R"
CALLER = named(HERE, "Caller")
BAD_PICKLES = {
    "too few": CALLER + ONE + b"\x85" + NEW,
    "too many": CALLER + ONE + TWO + ONE + b"\x87" + NEW,
    "called": CALLER + ONE + TWO + b"\x86" + CALLED,
    "state": CALLER + ONE + TWO + b"\x86" + NEW + b"}b",
    "state with items": CALLER + ONE + TWO + b"\x86" + NEW + b"}" + ONE + TWO + b"sb",
    "items": CALLER + ONE + TWO + b"\x86" + NEW + ONE + TWO + b"s",
    "class": CALLER + b"}b",
    "own comparison": named(HERE, "Equal") + ONE + b"\x85" + NEW,
}


@pytest.mark.parametrize("name", BAD_PICKLES)
def test_a_pickle_makes_nothing_else_of_the_class(name: str) -> None:
    before = dict(vars(Caller))
    with pytest.raises(FormatError):
        load_value(zipped(pickled(BAD_PICKLES[name])), where="w")
    assert dict(vars(Caller)) == before


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that the test can take away: then its classes are unknown."""
    module = types.ModuleType("named_tuples_of_a_library")
    for name in ("Caller", "Call"):
        cls = typing.NamedTuple(name, list(typing.get_type_hints(globals()[name]).items()))  # type: ignore[misc]
        cls.__module__ = module.__name__
        setattr(module, name, cls)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("first", ["megackpt", "torch_dist"])
def test_conversions_there_and_back_change_nothing(tmp_path: Path, library: Any, first: str) -> None:
    call = library.Call(library.Caller("loss", 3), 7)
    state = {"failed": call, "counts": {library.Caller("grad", 1): [call]}, "array": torch.arange(4.0)}
    objects = {"state": megackpt.ShardedObject("state", {"failed": call}, (1,), (0,)), **state}
    megackpt.save(objects, str(tmp_path / "0"), first)
    assert difference(megackpt.load({}, str(tmp_path / "0")), state) is None
    del sys.modules[library.__name__]
    if first == "megackpt":
        loaded = megackpt.load({}, str(tmp_path / "0"))["failed"]
        caller = ForeignNamedTuple(library.__name__, "Caller", ("message", "rank"), ("loss", 3))
        assert loaded == ForeignNamedTuple(library.__name__, "Call", ("caller", "sequence"), (caller, 7))
    else:
        with pytest.raises(UnknownClassError, match=r"library\.Call"):
            megackpt.load({}, str(tmp_path / "0"))
    formats = ("megackpt", "torch_dist", "megackpt")
    for number, name in enumerate(formats):
        megackpt.convert(tmp_path / str(number), tmp_path / str(number + 1), name)
        assert megackpt.diff(tmp_path / "0", tmp_path / str(number + 1)).is_equal
    sys.modules[library.__name__] = library
    for number in range(len(formats) + 1):
        location = str(tmp_path / str(number))
        assert difference(megackpt.load({}, location), state) is None
        asked = {"state": megackpt.ShardedObject("state", None, (1,), (0,))}
        assert difference(megackpt.load(asked, location)["state"], {"failed": call}) is None
        with keep_unknown_values():
            assert difference(megackpt.load_common_state_dict(location), state) is None
