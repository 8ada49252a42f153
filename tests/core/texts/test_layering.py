"""Who may import whom: downwards only. Imports in functions and under TYPE_CHECKING count."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import megackpt
from tests.support.docs import names_by_module

ROOT = Path(__file__).parents[3]

# A part of the package, and the parts that it may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "notices": set(),
    "moved_names": set(),
    "entry_points": {"notices"},
    "read_checkpoint": set(),
    "arguments": {"errors"},
    "options": {"arguments", "errors"},
    "geometry": {"errors"},
    "metadata": {"geometry", "errors"},
    "mapping": {"metadata", "geometry", "errors"},
    "planning": {"metadata", "geometry", "errors", "options"},
    # Maps between families of names: rules and their proofs, and requests in another family's names.
    "maps": {"mapping", "geometry", "entry_points", "errors"},
    "validation": {"planning", "metadata", "geometry", "notices", "errors", "options"},
    "codec": {"errors"},
    "comm": {"errors"},
    "storage": {"arguments", "errors"},
    "formats": {
        "planning", "metadata", "mapping", "geometry", "codec", "storage", "options", "entry_points",
        "notices", "errors",
    },
    "engine": {
        "formats", "validation", "planning", "maps", "mapping", "metadata", "geometry", "codec", "comm",
        "storage", "options", "notices", "errors",
    },
    # Public functions on whole checkpoints; the command line prints what they return.
    "maintenance": {
        "engine", "formats", "validation", "planning", "mapping", "maps", "metadata", "parallel", "geometry",
        "codec", "comm", "storage", "options", "arguments", "notices", "errors",
    },
    "api": {
        "engine", "formats", "validation", "maps", "mapping", "metadata", "comm", "storage", "options",
        "arguments", "errors",
    },
    "config": {"formats", "validation", "options", "arguments", "errors"},
    "checkpointer": {
        "api", "engine", "formats", "planning", "validation", "storage", "mapping", "maps", "comm", "options",
        "arguments", "notices", "errors",
    },
    "parallel": {"mapping", "geometry", "comm", "moved_names", "errors"},
    "optim": {"parallel", "mapping", "geometry", "comm", "errors"},
    "training_state": {"parallel", "mapping", "geometry", "comm", "errors"},
    # Other libraries' names over our core: at the rim.
    "compat": {
        "api", "engine", "formats", "validation", "mapping", "metadata", "codec", "optim", "comm", "storage",
        "options", "errors",
    },
    # Other libraries' tensors and interfaces, likewise. DCP's protocols stand over planning and engine:
    # DCP brings the ranks together itself, where `api` would.
    "integrations": {
        "compat", "checkpointer", "api", "maintenance", "engine", "formats", "validation", "planning",
        "optim", "parallel", "maps", "mapping", "metadata", "geometry", "codec", "comm", "storage",
        "training_state", "options", "notices", "errors",
    },
    # A user of the whole, and of peers; it wraps stores and strategies, and looks into the engine.
    "bench": {
        "api", "checkpointer", "engine", "formats", "planning", "mapping", "geometry", "comm", "storage",
        "options", "errors",
    },
    # Jobs that are not there, from the arithmetic of layers and optimizers, and the planner over them.
    "simulation": {
        "engine", "formats", "validation", "planning", "metadata", "parallel", "optim", "geometry", "storage",
        "options", "arguments", "errors",
    },
    "cli": {
        "bench", "simulation", "checkpointer", "maintenance", "api", "engine", "formats", "validation",
        "mapping", "maps", "metadata", "comm", "storage", "options", "arguments", "testing", "errors",
    },
}  # fmt: skip
ANYTHING = {"testing", "__init__"}

# The subpackages of `engine`: each may import those before it.
ENGINE_ORDER = [
    "data", "checkpoint", "saving", "loading", "verification", "tiers", "background",
]  # fmt: skip

# Packages of others that a part must not touch.
FORBIDDEN_OUTSIDE: dict[str, set[str]] = {
    "errors": {"torch", "numpy"},
    "geometry": {"torch"},
    "metadata": {"torch", "pathlib", "os"},
    "planning": {"torch", "pathlib", "os", "time"},
    "validation": {"torch", "pathlib", "os", "time"},
    "storage": {"torch"},
    "mapping": {"torch.distributed"},
    "codec": {"pickle", "torch.distributed"},
    "formats": {"pickle", "torch.distributed"},
    "engine": {"pickle", "torch.distributed"},
    "maintenance": {"pickle", "torch.distributed"},
    "training_state": {"pickle", "torch.distributed"},
    "api": {"torch.distributed"},
}

# Folders and files that own what the rest of their part must not touch: formats that are made of it.
OWNERS: dict[str, set[str]] = {
    "formats/torch_dist": {"pickle", "torch.distributed"},
    "formats/safe_pickle.py": {"pickle"},
    "formats/tensor_pickle.py": {"pickle"},
    "formats/pickle_limits.py": {"pickle"},  # its errors
    "formats/torch_zip.py": {"pickle"},  # its errors
    "formats/pickle_keys.py": {"pickle"},  # its errors, and opcodes; no class is looked up
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


def part_of(path: Path) -> str:
    inside = path.relative_to(ROOT / "megackpt")
    return inside.parts[0].removesuffix(".py")


FILES = sorted((ROOT / "megackpt").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_what_lies_below_it(path: Path) -> None:
    part = part_of(path)
    if part in ANYTHING:
        return
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT where it stands"
    imported = imports_of(path)
    ours = {name.split(".")[1] for name in imported if name.startswith("megackpt.")}
    assert ours - {part} <= MAY_IMPORT[part], (
        f"{part} must not import {sorted(ours - {part} - MAY_IMPORT[part])}"
    )
    inside = path.relative_to(ROOT / "megackpt")
    owned = OWNERS.get(str(inside), set()) | OWNERS.get(str(inside.parent), set())
    for outside in FORBIDDEN_OUTSIDE.get(part, set()) - owned:
        bad = [name for name in imported if name == outside or name.startswith(outside + ".")]
        assert not bad, f"{part} must not import {bad}"


def test_a_subpackage_of_the_engine_imports_only_those_before_it() -> None:
    engine = ROOT / "megackpt" / "engine"
    subpackages = {path.name for path in engine.iterdir() if (path / "__init__.py").exists()}
    assert subpackages == set(ENGINE_ORDER)
    assert [path.name for path in engine.glob("*.py")] == ["__init__.py"], (
        "put it into a subpackage of `engine`"
    )
    for path in sorted(engine.rglob("*/*.py")):
        subpackage = path.relative_to(engine).parts[0]
        allowed = set(ENGINE_ORDER[: ENGINE_ORDER.index(subpackage) + 1])
        if subpackage == "loading":
            allowed.remove("saving")
        used = {n.split(".")[2] for n in imports_of(path) if n.startswith("megackpt.engine.")}
        assert used <= allowed, f"engine/{subpackage} must not import {sorted(used - allowed)}: {path}"


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
    allowed = {"megackpt.parallel", "megackpt.mapping", "megackpt.maps", "megackpt.errors"}
    for path in (ROOT / "models").rglob("*.py"):
        ours = {".".join(n.split(".")[:2]) for n in imports_of(path) if n.startswith("megackpt.")}
        assert ours <= allowed, f"{path} imports {sorted(ours - allowed)}"


def test_examples_use_public_names_only() -> None:
    public = {
        "megackpt.compat", "megackpt.integrations", "megackpt.maps", "megackpt.optim", "megackpt.parallel",
        "megackpt.testing", "megackpt.training_state",
    }  # fmt: skip
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
