"""Public names: every error is exported, moved names work, annotations can be evaluated, advice is right.

Tools that make command lines, configurations or pages from signatures do that by `typing.get_type_hints`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import re
import subprocess
import sys
import typing
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import megackpt
from megackpt import errors
from megackpt.contrib.apex import declare_gathered
from megackpt.contrib.megatron.dist_checkpointing import serialization
from megackpt.contrib.megatron.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megackpt.contrib.transformer_engine.extra_state import read_extra_state
from megackpt.errors import CheckpointError, FormatError
from megackpt.ground import moved
from megackpt.ground.moved import moved_names
from tests.support.docs import names_by_module

PACKAGE = Path(megackpt.__file__).parent


def error_classes(module: Path, known: set[str]) -> set[str]:
    """Return the public classes of a module that derive from known error classes, directly or not."""
    names: set[str] = set()
    for name, bases in re.findall(r"^ *class (\w+)\((.*?)\):", module.read_text(), re.MULTILINE | re.DOTALL):
        if set(re.findall(r"\w+", bases)) & (known | names):
            names.add(name)
    return {name for name in names if not name.startswith("_")}


def test_every_error_class_of_the_package_is_exported() -> None:
    known = {"CheckpointError"} | error_classes(PACKAGE / "errors.py", {"CheckpointError"})
    assert {"MismatchError", "CommonStateError", "UnsupportedError"} <= known
    for module in sorted(PACKAGE.rglob("*.py")):
        if "testing" not in module.relative_to(PACKAGE).parts:
            known |= error_classes(module, known)
    assert known <= set(errors.__all__)
    assert all(issubclass(getattr(errors, name), CheckpointError) for name in known)
    of_package = {name for name in megackpt.__all__ if name.endswith("Error")}
    assert of_package <= known


LATE = [path for path in sorted(PACKAGE.rglob("__init__.py")) if "= lazy_names(" in path.read_text()]


@pytest.mark.parametrize("path", LATE, ids=lambda path: str(path.parent.relative_to(PACKAGE)))
def test_type_checkers_see_the_names_that_a_package_imports_late_and_no_others(path: Path) -> None:
    tree = ast.parse(path.read_text())
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(choice.test) == "TYPE_CHECKING"
    seen = {
        node.module: tuple(alias.name for alias in node.names)
        for node in choice.body
        if isinstance(node, ast.ImportFrom)
    }
    (assigned,) = choice.orelse
    assert isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.Call)
    assert ast.literal_eval(assigned.value.args[1]) == seen
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)


MOST_NAMES = {"megackpt": 53, "megackpt.training.parallel": 47}
MOVED = [(package, name) for package in MOST_NAMES for name in moved_names(package)]


@pytest.mark.parametrize("package", MOST_NAMES)
def test_a_package_has_few_names(package: str) -> None:
    module = importlib.import_module(package)
    assert len(module.__all__) <= MOST_NAMES[package]
    assert {name for name in dir(module) if not name.startswith("_")} == set(module.__all__)
    assert not moved_names(package).keys() & set(module.__all__)


@pytest.mark.parametrize(("package", "name"), MOVED)
def test_a_moved_name_is_the_same_object_and_one_notice_has_the_new_line(package: str, name: str) -> None:
    module = importlib.import_module(package)
    vars(module).pop(name, None)  # where the test runs twice in a process
    old_line = f"from {package} import {name} as old\n"
    names: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(old_line + old_line, "program.py", "exec"), names)
        by_attribute = getattr(module, name)
        unpickled = pickle.loads(f"c{package}\n{name}\n.".encode())
    (notice,) = caught
    assert (notice.category, notice.filename, notice.lineno) == (DeprecationWarning, "program.py", 1)
    new_line = str(notice.message).partition(" Write: ")[2]
    exec(new_line, names)
    _, new_module, _, new_name = new_line.split()
    assert names["old"] is names[new_name] is by_attribute is unpickled
    assert new_name in names_by_module()[new_module]


@pytest.mark.parametrize("package", MOST_NAMES)
def test_the_notice_about_an_attribute_is_of_the_line_that_uses_it(package: str) -> None:
    name = next(iter(moved_names(package)))
    module = importlib.import_module(package)
    vars(module).pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"`from {package} import {name}` will not work") as caught:
        getattr(module, name)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("package", MOST_NAMES)
def test_a_name_that_a_package_never_had_is_an_error(package: str) -> None:
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'nothing'"):
        getattr(importlib.import_module(package), "nothing")  # noqa: B009


OLD_MODULES = {
    "megackpt.parallel.adapters": "megackpt.training.parallel.adapters",
    "megackpt.compat.megatron.dist_checkpointing": "megackpt.contrib.megatron.dist_checkpointing",
    "megackpt.geometry": "megackpt.plans.geometry",
    "megackpt.config": "megackpt.contrib.megatron.config",
    "megackpt.parallel.dispatch": "megackpt.training.parallel.moe",
    "megackpt.parallel.scan": "megackpt.training.parallel.mamba",
}


@pytest.mark.parametrize("old", OLD_MODULES)
def test_a_module_under_its_old_name_is_the_same_module_with_one_notice_for_each_name(old: str) -> None:
    code = (
        f"import megackpt, sys, warnings; warnings.simplefilter('always')\n"
        f"import {old}\n"
        f"import {old}, {OLD_MODULES[old]} as new\n"
        f"assert {old} is new is sys.modules['{old}']\n"
        f"assert new.__spec__.name == new.__name__ == '{OLD_MODULES[old]}'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    notices = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert len(notices) == old.count(".")  # one for each package on the way
    assert notices[-1].startswith("<string>:2:")
    assert f"`{old}` will not work in the next version. Write: {OLD_MODULES[old]}" in notices[-1]


@pytest.mark.parametrize("line", ["from megackpt import parallel", "import megackpt; megackpt.parallel"])
def test_the_notice_of_an_old_module_is_of_the_line_that_uses_it(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"\n{line}"], capture_output=True, text=True, timeout=600)
    assert done.stderr.startswith("<string>:2: DeprecationWarning: `megackpt.parallel` will not work"), (
        done.stderr
    )


def test_the_table_of_old_modules_has_modules_that_exist() -> None:
    for old, new in moved._NEW_MODULE_NAMES.items():
        assert importlib.util.find_spec(f"megackpt.{new}") is not None
        assert not (PACKAGE / old).exists()
        assert not (PACKAGE / f"{old}.py").exists()


def test_a_module_that_never_was_is_no_module_under_an_old_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package on the way
        importlib.import_module("megackpt.geometry")
    with pytest.raises(ModuleNotFoundError, match=r"megackpt\.plans\.geometry\.nothing"):
        importlib.import_module("megackpt.geometry.nothing")


PUBLIC_PARTS = (
    "megackpt",
    "megackpt.training.parallel",
    "megackpt.training.optim",
    "megackpt.training.state",
    "megackpt.maps",
    "megackpt.plans.geometry",
    "megackpt.storage",
    "megackpt.contrib.apex",
    "megackpt.contrib.dcp",
    "megackpt.contrib.transformer_engine",
)

# Their argument `maps` may be a `Family` or a `RegionMap` of `megackpt.maps`: a thousand lines that a load
# without a map does not import.
IMPORTS_MAPS_LATER = {"load", "load_with_report"}


def annotated(public: object) -> Iterator[object]:
    """Yield a public function; or a class, its methods, and the functions of its properties."""
    if inspect.isfunction(public):
        yield public
    if inspect.isclass(public):
        yield public
        for member in vars(public).values():
            function = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
            if inspect.isfunction(function) and function.__module__.startswith("megackpt"):
                yield function


def names_of(part: str) -> set[str]:
    """Return the public names of a part: its `__all__`, or those that docs/names.md lists."""
    if part in PUBLIC_PARTS:
        return set(importlib.import_module(part).__all__)
    return set(names_by_module()[part])


@pytest.mark.parametrize("part", sorted({*PUBLIC_PARTS, *names_by_module()}))
def test_the_annotations_of_public_names_can_be_evaluated(part: str) -> None:
    module = importlib.import_module(part)
    faults = {}
    for name in sorted(names_of(part) - IMPORTS_MAPS_LATER):
        for item in annotated(getattr(module, name)):
            try:
                typing.get_type_hints(item)
            except (NameError, TypeError) as error:
                faults[name, getattr(item, "__qualname__", "")] = str(error)
    assert not faults


@pytest.mark.parametrize("name", sorted(IMPORTS_MAPS_LATER))
def test_a_load_has_annotations_when_the_types_of_maps_are_given(name: str) -> None:
    import megackpt
    from megackpt.maps import MapChoice

    hints = typing.get_type_hints(getattr(megackpt, name), localns={"MapChoice": MapChoice})
    assert hints["maps"] == MapChoice | None


def test_the_pages_of_the_reference_name_modules_that_exist() -> None:
    root = PACKAGE.parent
    pages = (root / "docs/site/reference.py").read_text().partition("\nPAGES = {")[2].partition("\n}\n")[0]
    named = re.findall(r'"((?:megackpt|\{PARALLEL\})[\w.]*)"', pages)
    assert len(named) > 50
    paths = [
        root / name.replace("{PARALLEL}", "megackpt/training/parallel").replace(".", "/") for name in named
    ]
    assert [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())] == []


OF_TORCH: dict[str, Callable[..., Any]] = {
    "load": torch.load,
    "load_state_dict": torch.nn.Module.load_state_dict,
    "redistribute": DTensor.redistribute,
    "state_dict": torch.nn.Module.state_dict,
    "to_empty": torch.nn.Module.to_empty,
}
OF_OTHERS = {
    "tensorstore_spec",  # in messages of tensorstore, which are shortened
    "locations",  # likewise
    "submodule_search_locations",  # in a program for another process
    "write_empty_chunks",  # an option of writers of zarr
    "use_collectives",  # of torch.distributed.checkpoint, from 2.8 on
    "single_grouped_weight",  # of Transformer Engine
    "tp_size",  # likewise
    "master_weights",  # likewise
    "storage_path",  # of Ray Train
    "use_cpu",  # of transformers
    "quantization_config",  # likewise; test_folder_kinds.py runs its lines
    "dequantize",  # likewise
    "save_original_format",  # likewise
    "initial_load_in_hf",  # of torchtitan
}
_ARGUMENT = re.compile(r"(?:(?P<owner>\w+)\((?:[^()]*[ ,(])?)?(?<![\w.\-])(?P<name>[a-z_]+)=(?!=)")


def _nodes() -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield all nodes of each module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), list(ast.walk(ast.parse(path.read_text())))


def _arguments(nodes: list[ast.AST]) -> Iterator[tuple[str, set[str]]]:
    """Yield functions and classes with the names of their arguments; fields are arguments of a class."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            yield node.name, _parameters(node)
        elif isinstance(node, ast.ClassDef):
            makers = [i for i in node.body if isinstance(i, ast.FunctionDef) and i.name == "__init__"]
            fields = [i.target for i in node.body if isinstance(i, ast.AnnAssign)]
            names = {field.id for field in fields if isinstance(field, ast.Name)}
            yield node.name, names.union(*map(_parameters, makers))


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}


def _texts(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module, with their lines, but no docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_arguments_in_error_texts_exist() -> None:
    arguments: dict[str, set[str]] = defaultdict(set)
    for name, function in OF_TORCH.items():
        arguments[name] |= set(inspect.signature(function).parameters)
    advised: list[tuple[str, str | None, str]] = []
    for path, nodes in _nodes():
        for name, parameters in _arguments(nodes):
            arguments[name] |= parameters
        if path == "cli/init.py":
            continue  # its strings are programs, which test_output.py runs
        for line, text in _texts(nodes):
            named = _ARGUMENT.finditer(text) if "=" in text else ()
            advised += [(f"{path}:{line}", match["owner"], match["name"]) for match in named]
    every = OF_OTHERS.union(*arguments.values())
    assert not [entry for entry in advised if entry[2] not in arguments.get(entry[1] or "", every)]
    assert len(advised) > 100, "the texts are not found"


class _Runs:
    """Unpickling it would end this process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def _evil() -> bytes:
    out = io.BytesIO()
    torch.save({"x": _Runs()}, out)
    return out.getvalue()


def _user_common(directory: Path) -> object:
    (directory / "common.pt").write_bytes(_evil())
    return TorchCommonLoadStrategy().load_common(directory)


OF_OTHER_BYTES: dict[str, Callable[[Path], object]] = {
    "state of Apex": lambda _: declare_gathered({"format": 1, "gathered_states": [_evil()]}, [], {}),
    "extra state of Transformer Engine": lambda _: read_extra_state(io.BytesIO(_evil())),
    "common.pt of a user's strategy": _user_common,
}


@pytest.mark.parametrize("name", OF_OTHER_BYTES)
def test_what_has_no_unsafe_load_does_not_advise_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="Nothing was run") as raised:
        OF_OTHER_BYTES[name](tmp_path)
    assert "allow_unsafe" not in str(raised.value)
    assert "torch.load(weights_only=False)" in str(raised.value)


def _checkpoint(directory: Path) -> Path:
    """Write a checkpoint that is read as Megatron-Core's: without the note and the copies of ours."""
    path = directory / "checkpoint"
    megackpt.save({"step": 1}, path, ("torch_dist", 1))
    for pattern in ("megackpt-*", "common-*"):
        for file in path.glob(pattern):
            file.unlink()
    (path / "common.pt").write_bytes(_evil())
    return path


OF_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: megackpt.load({"step": 0}, path),
    "load_common_state_dict": megackpt.load_common_state_dict,
    "load of Megatron-Core's face": lambda path: serialization.load({"step": 0}, str(path)),
}


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
def test_a_rejected_checkpoint_names_the_class_of_the_argument(name: str, tmp_path: Path) -> None:
    message = r"`megackpt convert --allow-unsafe-pickle`, or .*LoadOptions\(allow_unsafe_pickle=True\)\."
    with pytest.raises(FormatError, match=message):
        OF_CHECKPOINTS[name](_checkpoint(tmp_path))
