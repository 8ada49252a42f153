"""Who may import whom: downwards only. Imports in functions and under TYPE_CHECKING count."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import megackpt
from tests.support.docs import names_by_module

ROOT = Path(__file__).parents[3]

# Who may import whom: the table of rooms, from the top of the house to its ground.
_ROW = re.compile(r"^\| `(\w+)` \|(.*?)\|(.*?)\|(.*?)\|$", re.MULTILINE)
TABLE = (ROOT / "docs" / "design" / "000-reading-order.md").read_text().partition("## The rooms")[2]
ROOMS = {
    room: (re.findall(r"`(\w+)`", parts), set(re.findall(r"`(\w+)`", below)))
    for room, _, parts, below in _ROW.findall(TABLE.partition("\n## ")[0])
}

# Packages of others that a part must not touch.
FORBIDDEN_OUTSIDE: dict[str, set[str]] = {
    "errors": {"torch", "numpy"},
    "plans": {"torch", "pathlib", "os", "time"},
    "storage": {"torch"},
    "entities": {"torch.distributed"},
    "codec": {"pickle", "torch.distributed"},
    "formats": {"pickle", "torch.distributed"},
    "engine": {"pickle", "torch.distributed"},
    "whole": {"pickle", "torch.distributed"},
    "training/state": {"pickle", "torch.distributed"},
}

# Folders and files that own what the rest of their part must not touch: formats that are made of it.
OWNERS: dict[str, set[str]] = {
    "formats/torch_dist": {"pickle", "torch.distributed"},
    "formats/safe_pickle.py": {"pickle"},
    "formats/tensor_pickle.py": {"pickle"},
    "formats/pickle_limits.py": {"pickle"},  # its errors
    "formats/torch_zip.py": {"pickle"},  # its errors
    "formats/pickle_values.py": {"pickle"},  # its errors, and opcodes; no class is looked up
}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return modules


FILES = sorted((ROOT / "megackpt").rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "megackpt").parts[0].removesuffix(".py")


def test_a_room_is_in_the_table_and_imports_only_rooms_below_it() -> None:
    assert set(ROOMS) == {room_of(path) for path in FILES} - {"__init__"}
    below = set(ROOMS)
    for room, (_, may_import) in ROOMS.items():
        below.remove(room)
        assert may_import <= below, f"{room}: {sorted(may_import - below)} stand above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    imported = imports_of(path)
    room = room_of(path)
    if room != "__init__":
        others = {name.split(".")[1] for name in imported if name.startswith("megackpt.")} - {room}
        assert others <= ROOMS[room][1], f"{room} must not import {sorted(others - ROOMS[room][1])}"
    inside = path.relative_to(ROOT / "megackpt")
    folders = {str(inside), *map(str, inside.parents)}
    owned = set().union(*(OWNERS.get(folder, set()) for folder in folders))
    for outside in set().union(*(FORBIDDEN_OUTSIDE.get(folder, set()) for folder in folders)) - owned:
        bad = [name for name in imported if name == outside or name.startswith(outside + ".")]
        assert not bad, f"{inside} must not import {bad}"


@pytest.mark.parametrize("room", [room for room, (parts, _) in ROOMS.items() if parts])
def test_a_part_of_a_room_imports_only_those_before_it(room: str) -> None:
    folder, order = ROOT / "megackpt" / room, ROOMS[room][0]
    parts = {path.stem for path in folder.iterdir() if path.name[0] != "_" and (path.suffix or path.is_dir())}
    assert parts == set(order), f"name each part of {room} in the table"
    for path in sorted(folder.rglob("*.py")):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        allowed = set(order[: order.index(part) + 1])
        if (room, part) == ("engine", "loading"):
            allowed.remove("saving")
        used = {n.split(".")[2] for n in imports_of(path) if n.startswith(f"megackpt.{room}.")}
        assert used <= allowed, f"{room}/{part} must not import {sorted(used - allowed)}: {path}"


SHARED_BY_HOSTS = {"group_settings", "peft_names", "torch_state", "megatron"}
"""Files of `contrib` that more than one host needs: several train with Megatron-Core."""


def test_a_host_imports_no_other_host() -> None:
    contrib = ROOT / "megackpt" / "contrib"
    for path in contrib.rglob("*.py"):
        host = path.relative_to(contrib).parts[0].removesuffix(".py")
        used = {n.split(".")[2] for n in imports_of(path) if n.startswith("megackpt.contrib.")}
        assert used <= {host, *SHARED_BY_HOSTS}, f"{path} imports {sorted(used)}"


def test_a_format_imports_no_other_format() -> None:
    formats = ROOT / "megackpt" / "formats"
    shared = {path.stem for path in formats.glob("*.py")} - {"registry"}
    for path in formats.rglob("*.py"):
        inside = path.relative_to(formats).parts
        if len(inside) < 2:
            continue
        others = {n for n in imports_of(path) if n.startswith("megackpt.formats.")}
        foreign = {n for n in others if n.split(".")[2] not in {inside[0], *shared}}
        assert not foreign, f"{path}: {foreign}"


def test_models_are_built_from_layers_and_never_see_the_checkpoint_core() -> None:
    allowed = ("megackpt.training.parallel", "megackpt.entities", "megackpt.maps", "megackpt.errors")
    for path in (ROOT / "models").rglob("*.py"):
        others = [n for n in imports_of(path) if n.startswith("megackpt.") and not n.startswith(allowed)]
        assert not others, f"{path} imports {others}"


def test_examples_use_public_names_only() -> None:
    public = {"megackpt.contrib", "megackpt.maps", "megackpt.testing", "megackpt.training"}
    in_modules = {f"{module}.{name}" for module, names in names_by_module().items() for name in names}
    for path in (ROOT / "examples").rglob("*.py"):
        for name in imports_of(path):
            if not name.startswith("megackpt."):
                continue
            top = ".".join(name.split(".")[:2])
            is_public = top in public or name.removeprefix("megackpt.") in megackpt.__all__
            is_module = any(in_module.startswith(f"{name}.") for in_module in in_modules)
            assert is_public or is_module or name in in_modules, f"{path} imports {name}"


def test_every_public_name_exists() -> None:
    for module in [megackpt, *_packages()]:
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{module.__name__}.__all__ has {name!r}, which does not exist"


def _packages() -> list[object]:
    modules = pkgutil.iter_modules(megackpt.__path__, "megackpt.")
    return [importlib.import_module(m.name) for m in modules if m.ispkg and not m.name.endswith(".testing")]


WAITS_FOR_THREADS = {"ThreadPoolExecutor", "Thread", "window_threads", "join_thread"}


def test_no_generator_owns_threads() -> None:
    """The garbage collector may close it while a thread holds a lock that the end of a thread needs.

    A context manager made of a generator is none of these: `with` closes it.
    """
    owners = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or "contextmanager" in map(
                ast.unparse, node.decorator_list
            ):
                continue
            own = [inner for inner in ast.walk(node) if inner is not node]
            is_generator = any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in own)
            calls = {ast.unparse(i.func).rpartition(".")[2] for i in own if isinstance(i, ast.Call)}
            if is_generator and calls & WAITS_FOR_THREADS:
                owners.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert owners == []
