"""Every error that can reach a user is exported from `megackpt`."""

from __future__ import annotations

import ast
from pathlib import Path

import megackpt
from megackpt.errors import CheckpointError

PACKAGE = Path(megackpt.__file__).parent


def error_classes(module: Path, known: set[str]) -> set[str]:
    """Return the public classes of a module that derive from known error classes, directly or not."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if bases & (known | names):
                names.add(node.name)
    return {name for name in names if not name.startswith("_")}


def test_every_error_class_of_the_package_is_exported() -> None:
    known = {"CheckpointError"} | error_classes(PACKAGE / "errors.py", {"CheckpointError"})
    assert {"MismatchError", "CommonStateError", "UnsupportedError"} <= known
    for module in sorted(PACKAGE.rglob("*.py")):
        if "testing" not in module.relative_to(PACKAGE).parts:
            known |= error_classes(module, known)
    assert known <= set(megackpt.__all__)
    assert all(issubclass(getattr(megackpt, name), CheckpointError) for name in known)
