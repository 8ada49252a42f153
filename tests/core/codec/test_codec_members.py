"""Members of enumerations load as themselves where their class is imported, else as stand-ins."""

from __future__ import annotations

import argparse
import enum
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.codec import EncodedValue, decode, encode, leaf_digests
from megackpt.codec.pickled import ForeignName, ForeignObject
from megackpt.codec.stand_ins import ForeignMember
from megackpt.errors import FormatError, UnserializableError
from megackpt.testing.identical import difference
from tests.support.codec import Color, Level, WatchingMeta, import_watching_module, ran, round_trip


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


def test_nothing_is_imported() -> None:
    tree = {"$enum": {"module": "ssl", "class": "TLSVersion", "name": "TLSv1_2", "value": 771}}
    program = (
        "import sys; from megackpt.codec import EncodedValue, decode\n"
        "for name in ('ssl', '_ssl', 'encodings.idna'): sys.modules.pop(name, None)\n"
        f"print(decode(EncodedValue({tree!r}, ())), 'ssl' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert finished.stdout.strip() == "<ssl.TLSVersion.TLSv1_2: 771> False"


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


def test_megatrons_arguments_load_equal(tmp_path: Path) -> None:
    enums = pytest.importorskip("megatron.core.transformer.enums")
    args = argparse.Namespace(
        attention_backend=enums.AttnBackend.flash,
        model_type=enums.ModelType.encoder_or_decoder,
        cuda_graph_scope=[enums.CudaGraphScope.attn, enums.CudaGraphScope.moe_router],
        layer_types=(enums.LayerType.decoder, enums.AttnMaskType.causal, enums.AttnType.self_attn),
        exit_signal=signal.SIGTERM,
        params_dtype=torch.bfloat16,
        shape=torch.Size([2, 3]),
        data_path=[Path("/data"), None],
        betas=(0.9, 0.95),
        rampup_batch_size=None,
    )
    megackpt.save({"args": args, "iteration": 7}, str(tmp_path))
    loaded = megackpt.load({}, str(tmp_path))
    assert loaded["args"] == args
    assert loaded["args"].attention_backend is enums.AttnBackend.flash
    assert loaded["args"].exit_signal is signal.SIGTERM
