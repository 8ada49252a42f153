"""docs/megatron-compat.md covers every public name of Megatron-Core's dist_checkpointing, and is true."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from megackpt.contrib.megatron.errors import is_unsupported_name
from megackpt.errors import UnsupportedError
from tests.contrib.megatron import api_table
from tests.contrib.megatron.api_table import (
    ABSENT,
    NOTES,
    RENAMED,
    VERSIONS,
    judge,
    judge_import,
    load_facts,
    parse_signature,
)
from tests.contrib.megatron.imports_table import IMPORT_VERSIONS, imports_of, load_imports
from tests.contrib.megatron.test_installing import needs_megatron

HOW = "run python tests/contrib/megatron/api_table.py page"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_of_a_version_is_accounted_for(version: str) -> None:
    facts = load_facts(version)
    assert len(facts) > 200, "the facts are not those of a whole package"
    status = {name: judge(name, fact).status for name, fact in facts.items()}
    gaps = [name for name in facts if status[name] == "gap"]
    assert not gaps, f"say in page_notes.md why {version} has and we lack {gaps}"
    unexplained = [name for name in facts if status[name] == "differs" and name not in NOTES]
    assert not unexplained, f"explain in page_notes.md: {unexplained}"


def test_the_committed_page_is_what_the_script_writes() -> None:
    assert api_table.PAGE.read_text() == api_table.write_page(), HOW


def _all_rows() -> list[tuple[str, str, str]]:
    """Return every name once, with its kind and what the page calls it, of the newest version that has it."""
    rows = {
        name: (name, fact["kind"], judge(name, fact).status)
        for version in VERSIONS
        for name, fact in load_facts(version).items()
    }
    return sorted(rows.values())


def _used(name: str, kind: str) -> BaseException | None:
    """Use a name as a program would, with None for all arguments; return what that raised."""
    module, _, attribute = name.rpartition(".")
    try:
        if kind in ("method", "property"):
            cls = api_table.find_ours(module)
            if is_unsupported_name(cls):
                return _raised(lambda: getattr(cls, attribute))
            bare = types.SimpleNamespace() if inspect.isabstract(cls) else cls.__new__(cls)
            member = inspect.getattr_static(cls, attribute)
            if isinstance(member, property):
                return _raised(lambda: member.__get__(bare))
            call = member.__get__(None, cls) if isinstance(member, classmethod | staticmethod) else member
            first = () if isinstance(member, classmethod | staticmethod) else (bare,)
        else:
            call, first = api_table.find_ours(name), ()
            if not callable(call):
                return None
            if is_unsupported_name(call):
                return _raised(call)
    except TypeError as error:  # a class whose instances are made in another way
        return error
    try:
        parameters = list(inspect.signature(call).parameters.values())[len(first) :]
    except ValueError:
        parameters = []
    needed = [None for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD,)]
    return _raised(lambda: call(*first, *needed))


def _raised(use: Callable[[], Any]) -> BaseException | None:
    try:
        use()
    except BaseException as error:  # noqa: BLE001 - only its class is of interest
        return error
    return None


def test_every_name_is_what_the_page_calls_it() -> None:
    rows = _all_rows()
    assert sum(status == "unsupported" for _, _, status in rows) > 40
    for name, kind, status in rows:
        if status in ("renamed", "not offered"):
            assert api_table.find_ours(name) is api_table.MISSING, name
            continue
        assert status in ("same", "wider", "differs", "unsupported")
        error = _used(name, kind)
        assert isinstance(error, UnsupportedError) == (status == "unsupported"), f"{name}: {error!r}"
        if status == "unsupported":
            assert "is not offered by megackpt: " in str(error), name
            assert "  " not in str(error), f"{name}: {error}"


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_page_calls_the_same_takes_the_same_arguments(version: str) -> None:
    """By what Python says of the object that a program gets, not by the source that it was read from."""
    compared = 0
    for name, fact in load_facts(version).items():
        if "signature" not in fact or judge(name, fact).status != "same":
            continue
        member = api_table.find_ours(name)
        member = getattr(member, "__func__", member)
        theirs = [p.name for p in parse_signature(fact["signature"])]
        ours = [p for p in inspect.signature(member).parameters if p not in ("self", "cls")]
        assert ours == theirs, name
        compared += 1
    assert compared > 50


def test_notes_are_about_names_that_exist() -> None:
    known = {name for version in VERSIONS for name in load_facts(version)}
    assert set(NOTES) | set(RENAMED) | set(ABSENT) <= known


@needs_megatron
def test_the_stored_facts_and_imports_are_those_of_the_installed_megatron_core() -> None:
    package = distribution("megatron-core")
    assert package.version == "0.16.1"
    root = Path(str(package.locate_file("")))
    assert api_table.facts_of(root / "megatron/core/dist_checkpointing") == load_facts("0.16.1")
    # The wheel has megatron.core only, and the stored ones are those of the repository.
    imported, stored = (
        {(name, by) for name, modules in imports.items() for by in modules if by.startswith("megatron.core.")}
        for imports in (imports_of(root), load_imports("0.16.1"))
    )
    assert len(imported) > 50
    assert imported == stored


@pytest.mark.parametrize("version", IMPORT_VERSIONS)
def test_no_name_that_megatron_imports_is_missing(version: str) -> None:
    imports = load_imports(version)
    assert len(imports) >= 20, "the facts are not those of a whole repository"
    missing = [name for name in imports if judge_import(name) == "missing"]
    assert not missing, f"megatron {version} imports these, and stops where they are missing: {missing}"


def test_imports_are_found_in_every_way_to_write_them(tmp_path: Path) -> None:
    inside = tmp_path / "megatron" / "core" / "dist_checkpointing"
    inside.mkdir(parents=True)
    (inside / "a.py").write_text("from .b import not_counted")
    (inside.parent / "user.py").write_text(
        "from .dist_checkpointing.mapping import A as B\n"
        "def later():\n    from megatron.core.dist_checkpointing import _c\n"
    )
    (inside.parent / "__init__.py").write_text("import megatron.core.dist_checkpointing.utils as u")
    assert imports_of(tmp_path) == {
        "_c": ["megatron.core.user"],
        "mapping.A": ["megatron.core.user"],
        "utils": ["megatron.core"],
    }
