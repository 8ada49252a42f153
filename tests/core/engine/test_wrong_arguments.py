"""Arguments of the wrong kind or out of range: rejected by name, wherever they are options."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    AsyncOptions,
    CheckpointConfig,
    Checkpointer,
    DeclarationError,
    Groups,
    KeepBest,
    KeyRule,
    LoadOptions,
    LocalTier,
    MemoryTier,
    Retention,
    SaveOptions,
    SaveSchedule,
    StorageError,
    Tiers,
    convert,
    diff,
    load,
    repair,
    save,
    verify,
)
from megackpt import inspect as inspect_checkpoint
from megackpt.arguments import checked_step
from megackpt.options import VerifyOptions
from megackpt.storage import FileOptions, ObjectOptions

REQUIRED: dict[type, dict[str, Any]] = {
    AsyncOptions: {},
    CheckpointConfig: {},
    FileOptions: {},
    Groups: {},
    KeepBest: {"metric": "loss"},
    KeyRule: {"keys": "*"},
    LoadOptions: {},
    LocalTier: {"path": "/tmp/tier"},
    MemoryTier: {"path": "/dev/shm/tier"},
    ObjectOptions: {},
    Retention: {},
    SaveOptions: {},
    SaveSchedule: {},
    Tiers: {},
    VerifyOptions: {},
}
"""Every class of options, and what it cannot be made without."""

ALL = [(kind, field.name) for kind in REQUIRED for field in fields(kind) if field.init]
ARGUMENTS = [name for name in inspect.signature(Checkpointer).parameters if name != "root"]


@pytest.mark.parametrize(("kind", "name"), ALL, ids=[f"{kind.__name__}.{name}" for kind, name in ALL])
def test_an_option_of_a_wrong_kind_raises_an_error_with_its_name(kind: type, name: str) -> None:
    for value in (object(), math.nan, b"bytes"):
        with pytest.raises(DeclarationError, match=re.escape(name.removeprefix("dist_ckpt_"))):
            kind(**{**REQUIRED[kind], name: value})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_a_checkpointer_of_a_wrong_kind_raises_an_error_with_its_name(
    tmp_path: Path, name: str
) -> None:
    for value in (object(), math.nan, b"bytes"):
        with pytest.raises(DeclarationError, match=re.escape(name)):
            Checkpointer(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (SaveOptions, {"timeout_s": "60"}, "timeout_s is '60'; give a finite number above 0"),
        (SaveOptions, {"timeout_s": True}, "timeout_s is True"),
        (SaveOptions, {"timeout_s": math.inf}, "timeout_s is inf"),
        (SaveOptions, {"timeout_s": 1e30}, r"timeout_s is 1e\+30; give a number above 0 and up to 1e\+09"),
        (SaveOptions, {"part_bytes": 1.5}, "part_bytes is 1.5; give an int of at least 1"),
        (SaveOptions, {"part_bytes": 1 << 70}, "give an int from 1 to 4611686018427387904"),
        (SaveOptions, {"assume_constant_structure": "no"}, "is 'no'; give True or False"),
        (SaveOptions, {"parity": 0}, "parity is 0; .* how many data files share a parity file; or None"),
        (SaveOptions, {"compare_replicas": "error"}, "give Policy.ERROR, WARN or IGNORE"),
        (AsyncOptions, {"coordinator_host": ""}, "coordinator_host is ''; give text"),
        (AsyncOptions, {"nice": True}, "nice is True; give a number from 0 to 19"),
        (LoadOptions, {"exclude": "optimizer.*"}, r"exclude is 'optimizer.\*'; give a tuple of texts"),
        (LoadOptions, {"rules": [KeyRule(keys="*")]}, "give a tuple of rules"),
        (LoadOptions, {"rename": {"a": 3}}, "give stored keys by other names"),
        (KeyRule, {"keys": "*", "cast": "warn"}, "KeyRule.cast is 'warn'; give Policy.ERROR"),
        (
            ObjectOptions,
            {"config": {"secret": 5}},
            "config is a dict; it must be a mapping whose names and values are all text",
        ),
        (ObjectOptions, {"max_retries": -1}, "max_retries is -1; give an int of at least 0, 0 for none"),
        (MemoryTier, {"path": ""}, "MemoryTier: path is ''; give a directory"),
        (MemoryTier, {"path": "/t", "every": 1.5}, "MemoryTier: every is 1.5"),
        (SaveSchedule, {"agree_s": None}, "SaveSchedule.agree_s is None"),
    ],
)
def test_the_error_states_what_to_give(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("step", ["2", 2.0, math.nan, None, True, -1, 1 << 70, torch.zeros(2)])
def test_a_step_that_is_no_whole_number_raises_an_error_wherever_it_is_given(
    tmp_path: Path, step: Any
) -> None:
    checkpointer = Checkpointer(tmp_path)
    asked = [checkpointer.should_save, checkpointer.pin, checkpointer.metrics, checkpointer.directory]
    for ask in (*asked, lambda step: checkpointer.save(step, {})):
        with pytest.raises(DeclarationError, match=r"step is .*; steps are counted from 0, in whole numbers"):
            ask(step)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_an_integer_of_another_library() -> None:
    assert checked_step(torch.tensor(3)) == 3


@pytest.mark.parametrize("location", [None, b"run", 3, "", "http://host/run", Path("s3:/bucket/run")])
def test_what_is_no_location_is_an_error_of_every_function_that_takes_one(location: Any) -> None:
    for use in (
        Checkpointer,
        lambda location: save({}, location),
        lambda location: load({}, location),
        inspect_checkpoint,
        verify,
        lambda location: diff(location, location),
        lambda location: convert(location, location, "megackpt"),
        repair,
    ):
        with pytest.raises(
            (DeclarationError, StorageError), match=r"not a location|empty path|no store|one slash"
        ):
            use(location)


def test_wrong_arguments_of_functions_raise_an_error_with_their_names(tmp_path: Path) -> None:
    for arguments in ({"options": LoadOptions()}, {"plans": 3}, {"group": "world"}):
        with pytest.raises(DeclarationError, match=f"{next(iter(arguments))} is "):
            save({}, tmp_path, **arguments)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"consistancy_check is 3; give a function"):
        save({}, tmp_path, preprocess_common_before_consistancy_check=3)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"3.5 is not a save strategy: .* Give the name of a format"):
        save({}, tmp_path, 3.5)  # type: ignore[arg-type]
    with pytest.raises(DeclarationError, match=r"options is SaveOptions.*; give LoadOptions"):
        load({}, tmp_path, options=SaveOptions())  # type: ignore[call-overload]
    with pytest.raises(DeclarationError, match=r"metrics is 0.5; give numbers by name"):
        Checkpointer(tmp_path).save(1, {}, metrics=0.5)  # type: ignore[arg-type]
    assert list(tmp_path.glob("iter*")) == []


@pytest.mark.parametrize("function", [inspect_checkpoint, verify, diff, convert, repair])
def test_arguments_of_maintenance_functions_are_checked_before_anything_is_opened(
    tmp_path: Path, function: Any
) -> None:
    locations = {
        diff: [tmp_path / "a", tmp_path / "b"],
        convert: [tmp_path / "a", tmp_path / "b", "megackpt"],
    }
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY or name == "copies":
            for value in (object(), math.nan, b"bytes"):
                with pytest.raises(DeclarationError, match=re.escape(name)):
                    function(*locations.get(function, [tmp_path / "a"]), **{name: value})
    assert list(tmp_path.iterdir()) == []
