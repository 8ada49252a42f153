"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import megackpt

HOME = Path(megackpt.__path__[0]).parent


def has_examples(name: str) -> bool:
    return ">>> " in (HOME / f"{name.replace('.', '/')}.py").read_text()


FOUND = pkgutil.walk_packages(megackpt.__path__, "megackpt.")
MODULES = [module.name for module in FOUND if not module.ispkg and has_examples(module.name)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name)).failed == 0
