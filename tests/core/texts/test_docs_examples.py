"""What documents and docstrings say is true: examples run, shown outputs are real, links and paths exist.

The blocks of a document run in order, in one namespace, in an empty directory; functions named `test_...`
are called with a directory of their own. A `text` block right behind a `python` block is what that prints, or
the text of the error that it raises.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import megackpt
from megackpt import errors
from megackpt.codec import pickled
from megackpt.codec.encoder import KINDS
from megackpt.errors import CheckpointError
from megackpt.plans.metadata import DTYPES
from tests.support.docs import DOCUMENTS, FENCE, ON_RANKS, ROOT, blocks_of, examples_of, names_by_module, run

PUBLIC_PARTS = {
    "", "contrib", "maps", "plans", "read_checkpoint", "storage", "testing", "training",
    *(module.split(".")[1] for module in names_by_module()),
}  # fmt: skip
"""Parts of megackpt that users import from; most names are in the package itself."""

WITH_A_GROUP = {ROOT / "README.md", ROOT / "docs" / "index.md"}
"""One of their examples is FSDP2, which needs a process group."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:megackpt|models|examples|tests|docs)/[\w./-]+)`")
_DTYPE = re.compile(r"\| `(\w+)` \| (\d+) \| `(\w+)`")
_TAG = re.compile(r"`(\$\w+)`")
_ATTEMPT = re.compile(r"\b[0-9a-f]{16}\b")


def is_error_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CheckpointError)


def as_shown(text: str, directory: Path) -> str:
    """Replace what differs from run to run: the directory, and the id of an attempt."""
    return _ATTEMPT.sub("0123456789abcdef", text.replace(str(directory), "/data"))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if p != ON_RANKS], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_examples_of_a_document_run_and_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if path in WITH_A_GROUP:
        request.getfixturevalue("group_of_one")
    for example in examples_of(path.read_text()):
        if re.search("^import zarr$", example.code, re.MULTILINE):
            pytest.importorskip("zarr", reason="zarr 3.1 needs Python 3.11; the blocks before have run")
        printed = run(example, path, namespace)
        if example.output is not None:
            assert as_shown(printed, directory) == example.output, f"{path}, line {example.line + 1}"
    for name, value in namespace.items():
        if name.startswith("test_"):
            (tmp_path / name).mkdir()
            value(tmp_path / name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_lead_to_files(path: Path) -> None:
    text = path.read_text()
    targets = [link.partition("#")[0] for link in _LINK.findall(FENCE.sub("", text)) if "://" not in link]
    dead = [target for target in targets if target and not (path.parent / target).exists()]
    assert not dead, f"{path} links to {dead}"
    gone = [name for name in _PATH.findall(text) if not (ROOT / name).exists()]
    assert not gone, f"{path} names {gone}"


def test_the_readme_has_the_two_commands_of_a_newcomer_as_they_are_run() -> None:
    commands = [b.code for b in blocks_of((ROOT / "README.md").read_text()) if b.kind == "bash"]
    assert commands == [
        "pip install -e '.[examples]' -c tests/constraints.txt && python examples/elastic_resume.py\n",
        "pip install -e '.[test]' -c tests/constraints.txt && pytest -n 2 --dist loadfile\n",
    ]


def imported_parts(code: str) -> set[str]:
    """Return the parts of megackpt that a block of code imports from; "" for the package itself."""
    nodes = list(ast.walk(ast.parse(code)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {f"{name}.".split(".")[1] for name in modules if name.split(".")[0] == "megackpt"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_public_parts_only(path: Path) -> None:
    text = path.read_text()
    parts = {part for example in examples_of(text) for part in imported_parts(example.code)}
    allowed = PUBLIC_PARTS | ({"formats"} if path.name == "contributing.md" else set())
    assert parts - allowed == set()
    assert not re.search(r"\bmegackpt\.(engine\b|whole\.\w)", text)


def test_the_format_lists_every_dtype_and_every_tag_of_the_codec() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    dtypes = {name: (int(size), code) for name, size, code in _DTYPE.findall(text)}
    assert dtypes == {name: (info.itemsize, info.safetensors) for name, info in DTYPES.items()}
    tags = {tag for row in re.findall(r"^\| (`\$.*?) \|", text, re.MULTILINE) for tag in _TAG.findall(row)}
    assert tags == {"$registered", *(kind.tag for kind in (*KINDS, *pickled.KINDS))}


def test_the_tutorial_ends_in_a_test_and_every_error_class_has_a_section() -> None:
    tutorial = examples_of((ROOT / "docs" / "sharding-your-layer.md").read_text())
    assert tutorial[-1].code.count("\ndef test_") + tutorial[-1].code.startswith("def test_") == 1
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    classes = {name for name, value in vars(errors).items() if is_error_class(value)}
    assert classes - {"CheckpointError", "CheckpointingException"} == sections


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
