"""What a conversion or a comparison does not understand it carries along; a load rejects it; nothing runs."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import megackpt
from megackpt.cli.verify import command as verify_command
from megackpt.codec import EncodedValue, ForeignMember, decode, keep_unknown_values, leaf_digests
from megackpt.codec.pickled import ForeignObject
from megackpt.codec.stand_ins import ForeignName
from megackpt.errors import FormatError, UnknownClassError, UnserializableError
from megackpt.formats.safe_pickle import load_value, save_value
from tests.support.states import PickledCall, sharded, torch_saved
from tests.system.attacks.opcodes import zipped

LIBRARY = """
import collections, enum, typing

class Config:
    def __init__(self, lr):
        self.lr = lr

class Table(dict):
    pass

class Call(typing.NamedTuple):
    name: str
    sequence: int

class Mode(enum.Enum):
    ON = 1

class Bits(enum.Flag):
    A = 1
    B = 2

class Made:
    def __reduce__(self):
        return make, (3,)

def make(n):
    return Made()

class Node:
    def __init__(self, parent, **content):
        self.parent = parent
        self.content = content
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A module that the test can take away: then its classes are unknown."""
    module = types.ModuleType("someones_library")
    exec(compile(LIBRARY, "someones_library", "exec"), vars(module))
    sys.modules["someones_library"] = module
    yield module
    sys.modules.pop("someones_library", None)


def _state(library: Any) -> dict[str, Any]:
    config = library.Config(0.5)
    config.table = library.Table(a=torch.ones(2), b=[library.Mode.ON])
    args = argparse.Namespace(
        config=config,
        mode=library.Mode.ON,
        activation=library.make,
        partial=functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        call=library.Call("loss", 3),
        made=library.Made(),
        signal=signal.SIGTERM,
        counts=collections.Counter(a=1),
    )
    return {"args": args, "iteration": 7}


def _write_torch_dist(directory: Path, library: Any, state: dict[str, Any] | None = None) -> None:
    """A checkpoint of torch_dist whose common.pt holds objects of the library, as Megatron-Core writes it."""
    weight = sharded("weight", torch.arange(6.0))
    megackpt.save({"weight": weight, "iteration": 7}, str(directory), "torch_dist")
    for path in [*directory.glob("megackpt-*"), *directory.glob("common-*")]:
        path.unlink()  # what Megatron-Core does not write
    (directory / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    torch.save(state or _state(library), directory / "common.pt")
    sys.modules.pop("someones_library", None)


def _common(directory: Path) -> Any:
    with keep_unknown_values():
        return megackpt.load_common_state_dict(str(directory))


def _converted_there_and_back(directory: Path) -> None:
    """Convert `source` to the native format, to torch_dist as `back`, and again; nothing may change."""
    names = "source", "native", "back", "again"
    for source, target in pairwise(names):
        to = "torch_dist" if target == "back" else "megackpt"
        megackpt.convert(directory / source, directory / target, to)
        assert leaf_digests(_common(directory / target)) == leaf_digests(_common(directory / "source")), (
            target
        )
        assert megackpt.diff(directory / "source", directory / target).is_equal


def test_a_load_rejects_unknown_objects_and_a_conversion_there_and_back_changes_nothing(
    tmp_path: Path, library: Any
) -> None:
    expected = _state(library)
    _write_torch_dist(tmp_path / "source", library)
    with pytest.raises(UnknownClassError, match=r"names .*someones_library\.Config.*Nothing was run"):
        megackpt.load_common_state_dict(tmp_path / "source")
    assert "ForeignObject" in megackpt.inspect(tmp_path / "source").common["args.config"]
    _converted_there_and_back(tmp_path)
    # Of the native format there is nothing to reject: stand-ins show what they stand for.
    args = megackpt.load({}, tmp_path / "native")["args"]
    assert isinstance(args.config, ForeignObject)
    assert (args.config.module, args.config.qualname) == ("someones_library", "Config")
    assert args.config.state["lr"] == 0.5
    assert [key for key, _ in args.config.state["table"].items] == ["a", "b"]
    assert args.activation == ForeignName("someones_library", "make")
    assert args.call.args == ("loss", 3)
    assert args.made.is_called
    assert args.signal is signal.SIGTERM
    assert args.counts == {"a": 1}
    by_value = ForeignObject("someones_library", "Mode", (1,), is_called=True)
    by_name = ForeignMember("someones_library", "Mode", "ON", None)  # Python 3.11.0 to 3.11.3
    assert leaf_digests(args.mode) in (leaf_digests(by_value), leaf_digests(by_name))
    # Where the library is there again, what torch_dist holds are its objects.
    sys.modules["someones_library"] = library
    assert megackpt.load({}, tmp_path / "native")["args"].mode is library.Mode.ON
    loaded = torch.load(tmp_path / "back" / "common.pt", weights_only=False)["args"]
    assert type(loaded.config) is library.Config
    assert type(loaded.config.table) is library.Table
    assert torch.equal(loaded.config.table.pop("a"), torch.ones(2))
    assert loaded.config.table == {"b": [library.Mode.ON]}
    for name in ("mode", "activation", "call", "signal", "counts"):
        assert getattr(loaded, name) == getattr(expected["args"], name)
    assert type(loaded.made) is library.Made
    assert loaded.partial.func is torch.nn.functional.gelu
    assert loaded.partial.keywords == {"approximate": "tanh"}


def test_a_class_in_a_pickle_is_returned_by_its_name_and_never_called() -> None:
    groups = {"cpu_optimizer_cls": torch.optim.AdamW, "types": [int, torch.Tensor]}
    assert load_value(save_value(groups, path="w"), where="w") == groups
    absent = ForeignName("transformer_engine.pytorch.optimizers", "FusedAdam")
    data = save_value([absent], path="w")
    assert load_value(data, where="w") == [absent]
    optimizer = torch.optim.SGD([torch.ones(1)])
    with pytest.raises(UnknownClassError, match=r"names .*torch\.optim\.sgd\.SGD"):
        load_value(torch_saved(optimizer), where="w")
    with pytest.raises(UnserializableError, match=r"holds .*torch\.nn\.modules\.linear\.Linear, which"):
        save_value(torch.nn.Linear, path="w")


def test_a_save_warns_once_of_a_class_that_torch_has_to_allow(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        save_value([torch.optim.NAdam], path="common state")
    assert [record.getMessage() for record in caplog.records] == [
        "common state refers to torch.optim.nadam.NAdam. megackpt loads that; torch.load(weights_only=True), "
        "as in Megatron-Core, only after torch.serialization.add_safe_globals([torch.optim.nadam.NAdam])."
    ]


def test_a_comparison_sees_what_differs_in_unknown_objects(tmp_path: Path, library: Any) -> None:
    _write_torch_dist(tmp_path / "first", library)
    sys.modules["someones_library"] = library
    library.Config.__init__.__defaults__ = (0.25,)
    _write_torch_dist(tmp_path / "second", library)
    sys.modules["someones_library"] = library
    state = _state(library)
    state["args"].config.lr = 0.25
    torch.save(state, tmp_path / "second" / "common.pt")
    del sys.modules["someones_library"]
    (difference,) = megackpt.diff(tmp_path / "first", tmp_path / "second").values
    assert difference.path == "common state: args.config"
    assert "0.5" in str(difference.first)
    assert "0.25" in str(difference.second)


def test_a_codec_that_is_not_registered_is_carried_along(tmp_path: Path) -> None:
    from megackpt.codec.kinds import REGISTRY

    class Schedule:
        def __init__(self, warmup: int) -> None:
            self.warmup = warmup

    megackpt.register_codec(Schedule, "carried.Schedule", lambda value: value.warmup, Schedule)
    objects = megackpt.ShardedObject("state", Schedule(3), (1,), (0,))
    megackpt.save({"schedule": Schedule(5), "o": objects}, tmp_path / "source")
    codec = REGISTRY._by_name.pop("carried.Schedule")
    try:
        with pytest.raises(UnknownClassError, match="not registered"):
            megackpt.load({}, tmp_path / "source")
        megackpt.convert(tmp_path / "source", tmp_path / "target", "megackpt")
        assert megackpt.diff(tmp_path / "source", tmp_path / "target").is_equal
    finally:
        REGISTRY._by_name["carried.Schedule"] = codec
    assert megackpt.load({}, tmp_path / "target")["schedule"].warmup == 5


@pytest.mark.parametrize(
    "name", ["os\nsystem", "posix\nsystem", "sys\nexit", "a b\nc", "a\nb c", "nt\nsystem"], ids=repr
)
def test_some_names_are_never_carried_along(name: str) -> None:
    with keep_unknown_values(), pytest.raises((UnknownClassError, FormatError)):
        load_value(zipped(b"\x80\x02c" + name.encode() + b"\nX\x01\x00\x00\x00a\x85R."), where="w")


def test_nothing_that_a_carried_name_names_is_run(tmp_path: Path) -> None:
    path = str(tmp_path / "made").encode()
    text = b"X" + len(path).to_bytes(4, "little") + path
    for name in (b"shutil\nrmtree", b"pathlib\nPath.mkdir", b"builtins\neval", b"subprocess\ncheck_output"):
        with keep_unknown_values():
            loaded = load_value(zipped(b"\x80\x02c" + name + b"\n" + text + b"\x85R."), where="w")
        assert isinstance(loaded, ForeignObject)
    assert not (tmp_path / "made").exists()


def test_too_many_unknown_names_raise_an_error() -> None:
    names = b"".join(b"clib\nC%d\n0" % n for n in range(201))
    allowed = set(torch.serialization.get_safe_globals())
    with keep_unknown_values(), pytest.raises(FormatError, match="more than 200 unknown classes"):
        load_value(zipped(b"\x80\x02" + names + b"N."), where="w")
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_threads_that_carry_and_do_not_keep_to_themselves(library: Any) -> None:
    data = torch_saved([_state(library), signal.SIGINT])
    del sys.modules["someones_library"]
    before = set(torch.serialization.get_safe_globals())
    faults: list[object] = []

    def carry() -> None:
        for _ in range(30):
            with keep_unknown_values():
                if not isinstance(load_value(data, where="w")[0]["args"].config, ForeignObject):
                    faults.append("carry")

    def reject() -> None:
        for _ in range(30):
            try:
                load_value(data, where="w")
            except FormatError:
                continue
            faults.append("reject")

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - shown by the test
            faults.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in (carry, reject, carry, reject)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert set(torch.serialization.get_safe_globals()) == before


class Local(enum.Enum):
    ONE = 1


class LocalFlags(enum.IntFlag):
    A = 1
    B = 2


MEMBERS = [Local.ONE, LocalFlags.A, LocalFlags.A | LocalFlags.B, signal.SIGTERM]


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
def test_members_of_imported_enumerations_are_harmless(member: enum.Enum) -> None:
    assert load_value(save_value({"m": [member]}, path="m"), where="w")["m"][0] is member


def test_members_of_other_pythons_are_understood() -> None:
    by_name = zipped(b"\x80\x02csignal\nSIGTERM\n.")  # Python 3.10
    assert load_value(by_name, where="w") is signal.SIGTERM
    here = f"c{__name__}\nLocal\n".encode()
    by_getattr = zipped(b"\x80\x02cbuiltins\ngetattr\n" + here + b"X\x03\x00\x00\x00ONE\x86R.")  # 3.11.0
    assert load_value(by_getattr, where="w") is Local.ONE
    with pytest.raises(FormatError, match="no member of an enumeration"):
        load_value(
            zipped(b"\x80\x02cbuiltins\ngetattr\nX\x01\x00\x00\x00aX\x05\x00\x00\x00upper\x86R."), where="w"
        )


# Python 3.11.0 to 3.11.3 pickles a member, or a combination of flags, as a call.
A, B = (PickledCall(getattr, LocalFlags, name) for name in "AB")


def test_combinations_of_flags_of_other_pythons_are_understood() -> None:
    assert load_value(torch_saved(PickledCall(operator.or_, A, B)), where="w") is LocalFlags.A | LocalFlags.B
    unknown_bit = torch_saved(PickledCall(operator.or_, A, 64))
    with pytest.raises(FormatError, match=r"65 as a value of .*LocalFlags, which has no such member"):
        load_value(unknown_bit, where="w")
    with keep_unknown_values():
        assert load_value(unknown_bit, where="w") == ForeignMember(__name__, "LocalFlags", None, 65)
    for left, right in ((A, PickledCall(getattr, Local, "ONE")), ({"a": 1}, {"b": 2}), (1, 2)):
        with pytest.raises(FormatError, match=r"_operator\.or_"):
            load_value(torch_saved(PickledCall(operator.or_, left, right)), where="w")


def test_members_of_other_pythons_are_carried_along_where_their_class_is_unknown(
    tmp_path: Path, library: Any
) -> None:
    a, b = (PickledCall(getattr, library.Bits, name) for name in "AB")
    _write_torch_dist(tmp_path / "source", library, {"bits": [a, PickledCall(operator.or_, a, b)]})
    with pytest.raises(FormatError, match=r"someones_library\.Bits"):
        megackpt.load_common_state_dict(str(tmp_path / "source"))
    megackpt.convert(tmp_path / "source", tmp_path / "native", "megackpt")
    flag_a, flag_b = (ForeignMember("someones_library", "Bits", name, None) for name in "AB")
    bits = megackpt.load({}, tmp_path / "native")["bits"]
    assert (bits[0], bits[1].qualname, bits[1].args) == (flag_a, "or_", (flag_a, flag_b))
    megackpt.convert(tmp_path / "native", tmp_path / "back", "torch_dist")
    assert megackpt.diff(tmp_path / "source", tmp_path / "back").is_equal
    sys.modules["someones_library"] = library
    assert megackpt.load({}, tmp_path / "native")["bits"][0] is library.Bits.A
    written = torch.load(tmp_path / "back" / "common.pt", weights_only=False)
    assert written["bits"] == [library.Bits.A, library.Bits.A | library.Bits.B]


def test_a_value_that_no_member_has_raises_an_error() -> None:
    data = zipped(f"\x80\x02c{__name__}\nLocal\nK\x09\x85R.".encode("latin1"))
    with pytest.raises(FormatError, match=r"9 as a value of .*Local, which has no such member"):
        load_value(data, where="w")
    with keep_unknown_values():
        assert load_value(data, where="w") == ForeignMember(__name__, "Local", None, 9)


def test_members_that_were_saved_by_name_can_be_converted_where_they_are_unknown(
    tmp_path: Path, library: Any
) -> None:
    megackpt.save({"mode": library.Mode.ON, "modes": ({library.Mode.ON: 1},)}, tmp_path / "native")
    del sys.modules["someones_library"]
    assert megackpt.load({}, tmp_path / "native")["mode"] == ForeignMember(
        "someones_library", "Mode", "ON", 1
    )
    megackpt.convert(tmp_path / "native", tmp_path / "torch_dist", "torch_dist")
    megackpt.convert(tmp_path / "torch_dist", tmp_path / "again", "megackpt")
    assert megackpt.diff(tmp_path / "native", tmp_path / "again").is_equal
    sys.modules["someones_library"] = library
    assert megackpt.load({}, tmp_path / "again")["mode"] is library.Mode.ON
    assert torch.load(tmp_path / "torch_dist" / "common.pt", weights_only=False)["mode"] is library.Mode.ON


def test_a_verification_does_not_fail_on_classes_that_nobody_asked_for(tmp_path: Path, library: Any) -> None:
    objects = {"o": megackpt.ShardedObject("o", {"mode": library.Mode.ON}, (1,), (0,))}
    megackpt.save({**objects, "iteration": 7}, tmp_path / "enum", "torch_dist")
    _write_torch_dist(tmp_path / "source", library)
    megackpt.convert(tmp_path / "source", tmp_path / "back", "torch_dist")
    for name in ("source", "back", "enum"):
        verification = megackpt.verify(tmp_path / name, deep=True)
        assert (verification.damages, verification.unknown_values) == ((), 1), name
        ran = CliRunner().invoke(verify_command, [str(tmp_path / name), "--deep"])
        assert "1 values (objects or common state) have classes that are not known here" in ran.output
        assert "damage" not in ran.output
    common = tmp_path / "source" / "common.pt"
    for wrong in (zipped(b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R."), common.read_bytes()[:-900]):
        common.write_bytes(wrong)
        verification = megackpt.verify(tmp_path / "source", deep=True)
        assert [damage.file for damage in verification.damages] == ["common.pt"]


def _tree_of_nodes(library: Any) -> Any:
    """A tree whose nodes refer to their parents, as those of a configuration of omegaconf do."""
    root = library.Node(None)
    inner = root.content["inner"] = library.Node(root, rate=0.5)
    inner.content["layers"] = [library.Node(inner, size=i) for i in range(3)]
    inner.content["root"] = root
    return root


def test_objects_that_refer_to_their_parents_are_carried_along(tmp_path: Path, library: Any) -> None:
    root = _tree_of_nodes(library)
    _write_torch_dist(tmp_path / "source", library, {"config": root, "part": root.content["inner"]})
    _converted_there_and_back(tmp_path)
    stand_in = megackpt.load({}, tmp_path / "native")["config"]
    inner = stand_in.state["content"]["inner"]
    assert inner.state["parent"] is inner.state["content"]["root"] is stand_in
    assert "Node" in repr(stand_in)
    sys.modules["someones_library"] = library
    state = torch.load(tmp_path / "back" / "common.pt", weights_only=False)
    inner = state["config"].content["inner"]
    assert inner.parent is inner.content["root"] is state["config"]
    assert [node.parent is inner for node in inner.content["layers"]] == [True] * 3
    assert [node.content for node in inner.content["layers"]] == [{"size": i} for i in range(3)]
    assert state["part"].parent.content["inner"] is state["part"]
    assert state["part"].content["rate"] == 0.5


def test_objects_that_all_refer_to_each_other_are_rejected_in_time(tmp_path: Path, library: Any) -> None:
    nodes = [library.Node(None) for _ in range(9)]
    for node in nodes:
        node.content["all"] = list(nodes)
    _write_torch_dist(tmp_path / "source", library, {"config": nodes[0]})
    with pytest.raises(UnserializableError, match=r"config.*in too many ways"):
        megackpt.convert(tmp_path / "source", tmp_path / "native", "megackpt")


@pytest.mark.parametrize("level", [0, 2, -1, "1", None])
def test_a_reference_to_no_object_around_it_is_an_error(level: Any) -> None:
    names = {"module": "m", "class": "C", "called": False}
    fields = {"args": [], "state": {"$enclosing": level}, "items": []}
    with pytest.raises(FormatError, match="cannot be decoded"):
        decode(EncodedValue({"$foreign": {**names, **fields}}, ()))
    fields = {"args": [{"$enclosing": 1}], "state": None, "items": []}
    with pytest.raises(FormatError, match="0 objects around it"):  # there is none yet
        decode(EncodedValue({"$foreign": {**names, **fields}}, ()))


def test_configurations_of_omegaconf_are_carried_along(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"lr": 0.5, "model": {"layers": [1, None], "width": "${lr}"}})
    omegaconf.OmegaConf.set_struct(config, True)
    _write_torch_dist(tmp_path / "source", types.ModuleType("none"), {"hyper_parameters": {"cfg": config}})
    _converted_there_and_back(tmp_path)
    loaded = torch.load(tmp_path / "back" / "common.pt", weights_only=False)["hyper_parameters"]["cfg"]
    assert loaded == config
    assert (loaded.model.width, omegaconf.OmegaConf.is_struct(loaded)) == (0.5, True)
