"""A pickle of a checkpoint changes nothing of the process: no class, function, member or module."""

from __future__ import annotations

import enum
import pathlib
import pickle
import signal
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.metadata as dcp_metadata

from megackpt.codec import keep_unknown_values
from megackpt.errors import FormatError
from megackpt.formats.pickle_limits import check_opcodes
from megackpt.formats.safe_pickle import load_value
from megackpt.formats.tensor_pickle import load_tensor_pickle
from megackpt.formats.torch_dist.metadata_unpickler import load_metadata
from tests.system.attacks.opcodes import binary, call, named, pickled, text, zipped


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2

    def __setstate__(self, state: Any) -> None:
        self._value_ = 99


class Pair(typing.NamedTuple):
    first: int


class Plain:
    pass


def _of_torch(data: bytes) -> Any:
    return load_value(zipped(data), where="w")


def _of_old_torch(data: bytes) -> Any:
    numbers = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {})
    head = b"".join(pickle.dumps(number, protocol=2) for number in numbers)
    return load_value(head + data + pickle.dumps([], protocol=2), where="w")


def _carried(data: bytes) -> Any:
    with keep_unknown_values():
        return load_value(zipped(data), where="w")


def _of_dcp(data: bytes) -> Any:
    return load_metadata(data, where="w")


def _of_tensors(data: bytes) -> Any:
    return load_tensor_pickle(data, [(HERE, "Plain")], where="w")


READERS: list[Callable[[bytes], Any]] = [_of_torch, _of_old_torch, _carried, _of_dcp, _of_tensors]
HERE = __name__
ONE = b"K\x01"
_META = "torch.distributed.checkpoint.metadata"

# Opcodes that leave something on the stack that the pickle has not made.
TARGETS = {
    "class": named("collections", "OrderedDict"),
    "class_of_paths": named("pathlib", "PurePosixPath"),
    "class_of_posix_paths": named("pathlib", "PosixPath"),
    "class_of_dcp": named(_META, "BytesStorageMetadata"),
    "class_of_users": named(HERE, "Plain"),
    "class_of_named_tuples": named(HERE, "Pair"),
    "enumeration": named("signal", "Signals"),
    "enumeration_of_users": named(HERE, "Shade"),
    "enumeration_of_dcp": named(_META, "_MEM_FORMAT_ENCODING"),
    "member": call(named("signal", "Signals"), b"K\x0f"),
    "member_by_name": named("signal", "SIGTERM"),
    "member_by_getattr": call(named("builtins", "getattr"), named("signal", "Signals"), "SIGTERM"),
    "member_of_users": call(named(HERE, "Shade"), ONE),
    "member_by_new": named(HERE, "Shade") + ONE + b"\x85\x81",
    "member_of_dcp": call(named(_META, "_MEM_FORMAT_ENCODING"), b"K\x00"),
    "function": named("torch._utils", "_rebuild_tensor_v2"),
    "function_of_dcp": named("torch.serialization", "_get_layout"),
    "function_of_megackpt": named("megackpt.formats.safe_numpy", "scalar"),
    "module": named("torch", "nn"),
    "module_by_path": named("torch", "_utils"),
    "dtype": named("torch", "float32"),
    "layout": call(named("torch.serialization", "_get_layout"), "torch.strided"),
    "by_the_memo": named("pathlib", "PurePosixPath") + b"q\x00" + b"0" + b"h\x00",
    "twice": named("pathlib", "PurePosixPath") + b"2",
    "in_a_list": b"]" + named("signal", "SIGTERM") + b"a",
    "behind_a_popped_mark": named("pathlib", "PurePosixPath") + b"(0",
}
_STATE = {
    "dict": b"}" + text("_value_") + b"K\x09s",
    "slots": b"N}" + text("__str__") + named("torch", "Size") + b"s\x86",
}
_ARGUMENTS = b"(K\x01t"


def _state_of_process() -> dict[str, dict[str, int]]:
    """Return the identity of everything in the modules that the attacks name, and in their classes."""
    torch.serialization._get_layout("torch.strided")  # it fills a table of its own at its first call
    modules = [
        "argparse", "builtins", "collections", "enum", "functools", "io", "pathlib", "signal", "torch",
        "torch._utils", "torch.serialization", _META, "torch.distributed.checkpoint.planner", "types", HERE,
        "megackpt.formats.safe_numpy", "megackpt.formats.safe_pickle", "megackpt.formats.unknown_classes",
    ]  # fmt: skip
    changes: dict[str, dict[str, int]] = {}
    for module in modules:
        names = vars(sys.modules[module])
        changes[module] = {name: id(value) for name, value in names.items()}
        for name, value in names.items():
            if isinstance(value, type):
                changes[f"{module}.{name}"] = {key: id(item) for key, item in vars(value).items()}
            elif isinstance(value, enum.Enum) or callable(value):
                changes[f"{module}.{name}"] = dict.fromkeys(map(repr, vars_of(value).items()), 0)
    members = [*signal.Signals, *Shade, *dcp_metadata._MEM_FORMAT_ENCODING]
    changes["members"] = {repr(member): hash(repr(vars(member))) for member in members}
    return changes


def vars_of(value: object) -> dict[str, Any]:
    own = getattr(value, "__dict__", {})
    return own if isinstance(own, dict) else {}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_what_a_pickle_gets_by_a_name_cannot_be_changed(reader: Callable[[bytes], Any]) -> None:
    before = _state_of_process()
    allowed = [Shade, Plain, signal.Signals]
    for users in ([], allowed):
        torch.serialization.add_safe_globals(users)
        try:
            for name, target in TARGETS.items():
                for kind, state in _STATE.items():
                    with pytest.raises(FormatError):
                        pytest.fail(f"BUILD {kind} of {name} gave {reader(pickled(target, state, b'b'))!r}")
        finally:
            torch._weights_only_unpickler._remove_safe_globals(users)
    assert _state_of_process() == before
    assert signal.SIGTERM.value == 15


def test_what_the_bytes_of_a_storage_give_cannot_be_changed() -> None:
    """The bytes of a storage are a file of their own, which may name what other files may."""
    before = _state_of_process()
    for name, target in TARGETS.items():
        storage = call(named("torch.storage", "_load_from_bytes"), binary(zipped(pickled(target))))
        for kind, state in _STATE.items():
            with pytest.raises(FormatError):
                pytest.fail(f"BUILD {kind} of {name} gave {_of_tensors(pickled(storage, state, b'b'))!r}")
    assert _state_of_process() == before


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_function_of_torch_that_sets_attributes_changes_no_member(reader: Callable[[bytes], Any]) -> None:
    before = _state_of_process()
    rebuild = named("torch._tensor", "_rebuild_from_type_v2")  # makes an object, then sets its attributes
    for cls, value in ((named("signal", "Signals"), b"K\x0f"), (named(HERE, "Shade"), ONE)):
        for state in _STATE.values():
            with pytest.raises(FormatError):
                reader(pickled(call(rebuild, cls, cls, value + b"\x85", state)))
    assert _state_of_process() == before


# What can be called and made: its class does nothing but hold what it is given.
_CAN_BE_CALLED = ("class", "enumeration", "by_the_memo", "twice", "behind", "function")


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("make", [b"R", b"\x81"], ids=["REDUCE", "NEWOBJ"])
def test_members_modules_and_values_cannot_be_called(reader: Callable[[bytes], Any], make: bytes) -> None:
    before = _state_of_process()
    for name, target in TARGETS.items():
        if name.startswith(_CAN_BE_CALLED) or (reader is _carried and name.startswith("module")):
            continue  # a name of a module is that of an unknown class, where those are carried along
        with pytest.raises(FormatError):
            pytest.fail(f"{make!r} of {name} gave {reader(pickled(target, _ARGUMENTS, make))!r}")
    for name, target in TARGETS.items():
        is_unknown = reader is _carried and name == "function_of_megackpt"
        if name.startswith(("enumeration", "function")) and make == b"\x81" and not is_unknown:
            with pytest.raises(FormatError):
                pytest.fail(f"NEWOBJ of {name} gave {reader(pickled(target, _ARGUMENTS, make))!r}")
    assert _state_of_process() == before


def test_what_a_pickle_has_made_can_be_given_attributes() -> None:
    ordered = named("collections", "OrderedDict") + b")R"
    actual = _of_torch(pickled(ordered, text("a") + b"K\x01s", b"}" + text("_metadata") + b"K\x02s", b"b"))
    assert actual == {"a": 1}
    assert vars(actual) == {"_metadata": 2}
    made = named(_META, "MetadataIndex") + b")\x81"
    state = b"}" + text("fqn") + text("w") + b"s" + text("offset") + b"Ns" + text("index") + b"Ns"
    assert _of_dcp(pickled(made, state, b"b")) == dcp_metadata.MetadataIndex("w")


def test_the_stack_is_followed_as_an_unpickler_does() -> None:
    # POP takes a mark away where one is on top: what is below it is the target, not what is made afterwards.
    path = named("pathlib", "PurePosixPath")
    data = pickled(path, b"(", b"0", b"N}" + text("__str__") + ONE + b"s\x86", b"b")
    with pytest.raises(pickle.UnpicklingError, match="has not made"):
        check_opcodes(data)
    assert pathlib.PurePosixPath("a").__str__() == "a"
