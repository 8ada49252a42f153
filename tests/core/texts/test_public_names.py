"""Public names: every error is exported, and annotations can be evaluated.

Tools that make command lines, configurations or pages from signatures do that by `typing.get_type_hints`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import megackpt
from megackpt.errors import CheckpointError

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
    assert known <= set(megackpt.__all__)
    assert all(issubclass(getattr(megackpt, name), CheckpointError) for name in known)


PUBLIC_PARTS = (
    "megackpt",
    "megackpt.parallel",
    "megackpt.optim",
    "megackpt.training_state",
    "megackpt.maps",
    "megackpt.geometry",
    "megackpt.storage",
    "megackpt.integrations.apex",
    "megackpt.integrations.dcp",
    "megackpt.integrations.transformer_engine",
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


@pytest.mark.parametrize("part", PUBLIC_PARTS)
def test_the_annotations_of_public_names_can_be_evaluated(part: str) -> None:
    module = importlib.import_module(part)
    faults = {}
    for name in sorted(set(module.__all__) - IMPORTS_MAPS_LATER):
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
