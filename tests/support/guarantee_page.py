"""Makes the page of guarantees: finds the tests that prove each, and the command that runs them."""

from __future__ import annotations

import ast
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.docs import FENCE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"

PLAIN, SYSTEM, HOSTS, DOCS = "pytest", ".ci/run system", ".ci/run hosts", ".ci/run docs"
ALL, GPU = "pytest --all tests", "pytest -m gpu tests"
LEVELS = (PLAIN, SYSTEM, HOSTS, DOCS, ALL, GPU)
"""The commands that run tests, those that need least first."""
IN_CI = {PLAIN, SYSTEM, HOSTS, DOCS}
"""A submission must pass these."""

HEAD = """# What is guaranteed, and which test proves it

After this page you know on which sentences of these docs you can rely, and which tests fail if one is no
longer true. Run the command in the last column to see it proved on your machine, or read the test.

If tests of a row have different commands, the column has all of them. `.ci/run hosts` and `.ci/run docs`
install other libraries first. Tests of many cases try a sample of them, and all with `--all`:
[contributing](contributing.md#running-the-tests). The list is `tests/guarantees.py`, and
`python -m tests.guarantees` writes this page.
"""

Guarantees = Mapping[str, Mapping[str, Sequence[str]]]
"""Pages, each with its quoted sentences, each with the names of the tests that prove it."""


class GuaranteeError(Exception):
    """A quote or the name of a test leads nowhere, or to several things."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTest:
    """A function that pytest collects."""

    path: str  # its file, from the root of the repository
    name: str  # its name
    marks: frozenset[str]  # names of the marks of the function and of its module


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command of .ci/hosts or .ci/docs that runs tests."""

    level: str  # the part of .ci/run
    paths: tuple[str, ...]  # files and folders that it names
    words: tuple[str, ...]  # a test that it runs has one of these in its path or name; empty for all tests
    tries_all: bool  # whether it has `--all`

    def has(self, test: FoundTest) -> bool:
        """Whether the command runs a test, by its path and name."""
        is_below = any(test.path == path or test.path.startswith(f"{path}/") for path in self.paths)
        text = f"{test.path}::{test.name}".lower()
        has_word = not self.words or any(word.lower() in text for word in self.words)
        return is_below and has_word and (self.tries_all or "with_all" not in test.marks)


@cache
def all_tests() -> dict[str, tuple[FoundTest, ...]]:
    """Return all test functions below tests/, by name."""
    tests: dict[str, list[FoundTest]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        of_module = frozenset(_marks_of_module(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = of_module.union(*(_names_in(decorator) for decorator in node.decorator_list))
                relative = path.relative_to(ROOT).as_posix()
                tests[node.name].append(FoundTest(path=relative, name=node.name, marks=marks))
    return {name: tuple(same_name) for name, same_name in tests.items()}


def _marks_of_module(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(_is_pytestmark(target) for target in node.targets):
            yield from _names_in(node.value)


def _is_pytestmark(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) and target.id == "pytestmark"


def _names_in(decorator: ast.expr) -> set[str]:
    """Return the words of a mark: `pytest.mark.gpu`, or `with_all(...)`."""
    if isinstance(decorator, (ast.List, ast.Tuple)):
        return set().union(*(_names_in(element) for element in decorator.elts))
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return set(ast.unparse(called).split("."))


def find_test(name: str) -> FoundTest:
    """Return the test of a name, or of a `file.py::name` where several files have a function of that name."""
    file, _, function = name.rpartition("::")
    tests = [t for t in all_tests().get(function, ()) if f"/{t.path}".endswith(f"/{file}" if file else "")]
    if not tests:
        raise GuaranteeError(f"{name}: no file of tests/ has such a function. Correct its name in the list.")
    if len(tests) > 1:
        paths = ", ".join(test.path for test in tests)
        raise GuaranteeError(f"{name}: {paths} have such functions. Write file.py::{function} in the list.")
    return tests[0]


@cache
def runs_of_ci() -> tuple[Run, ...]:
    """Return the commands of .ci/hosts and .ci/docs that run tests."""
    runs = []
    for level, script in ((HOSTS, "hosts"), (DOCS, "docs")):
        for line in (ROOT / ".ci" / script).read_text().splitlines():
            if "pytest" in line:  # others may go on in the next line
                words = shlex.split(line, comments=True)
                runs.append(_run_of(words[words.index("pytest") + 1 :], level))
    return tuple(runs)


def _run_of(arguments: list[str], level: str) -> Run:
    chosen = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    paths = tuple(argument for argument in arguments if argument.startswith("tests/"))
    words = tuple(chosen.split(" or ")) if chosen else ()
    return Run(level=level, paths=paths, words=words, tries_all="--all" in arguments)


def level_of(test: FoundTest) -> str:
    """Return the command that runs a test; of several the one that is sure to run it."""
    if "gpu" in test.marks or test.path.startswith("tests/gpu/"):
        return GPU
    in_ci = [run.level for run in runs_of_ci() if run.has(test)]
    is_plain = test.path.startswith(("tests/core/", "tests/training/"))
    if is_plain and "with_all" not in test.marks:
        return PLAIN
    if in_ci:
        return in_ci[0]
    return ALL if "with_all" in test.marks else SYSTEM


def levels_of(names: Sequence[str]) -> list[str]:
    """Return the commands that run these tests, each once, those that need least first."""
    levels = {level_of(find_test(name)) for name in names}
    return [level for level in LEVELS if level in levels]


def folded(text: str) -> str:
    """Return a text with each sequence of white space as one space."""
    return " ".join(text.split())


def page(guarantees: Guarantees, exceptions: Mapping[str, str]) -> str:
    """Return the text of the page; exceptions are reasons why a quote has no test in CI."""
    parts = [HEAD]
    for name, quotes in guarantees.items():
        text = (ROOT / name).read_text()
        rows = [_row(name, text, quote, tests, exceptions.get(quote)) for quote, tests in quotes.items()]
        title = f"[{name}]({name.removeprefix('docs/')})" if name.startswith("docs/") else name
        parts.append("\n".join([f"## {title}", "", *TABLE, *rows, ""]))
    return "\n".join(parts)


TABLE = ("| guarantee | proved by | run by |", "|---|---|---|")


def _row(name: str, text: str, quote: str, tests: Sequence[str], exception: str | None) -> str:
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", quote).replace("|", "\\|")
    if name.startswith("docs/"):
        shown = f"[{shown}]({name.removeprefix('docs/')}{anchor_of(text, quote)})"
    links = [_link(find_test(test)) for test in tests]
    levels = "<br>".join(f"`{level}`" for level in levels_of(tests))
    reason = "" if exception is None else f"; {exception}"
    return f"| {shown} | {'<br>'.join(links)} | {levels}{reason} |"


def _link(test: FoundTest) -> str:
    return f"[`{Path(test.path).name}::{test.name}`](../{test.path})"


def anchor_of(text: str, quote: str) -> str:
    """Return `#` and the id of the heading that a quote of a page stands under; "" at its top."""
    plain = FENCE.sub(lambda fence: re.sub("^#", " ", fence[0], flags=re.MULTILINE), text)
    sections = re.split(r"^##+ (.*)$", plain, flags=re.MULTILINE)
    for heading, body in zip(sections[1::2], sections[2::2], strict=True):
        if folded(quote) in folded(body):
            words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
            return "#" + re.sub(r"[-\s]+", "-", words)
    return ""
