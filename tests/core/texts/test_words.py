"""Words that stay out of the project: each has a standard word in PyTorch's or Megatron's vocabulary.

docs/concepts.md defines the words that remain private to this library.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from megackpt import errors

ROOT = Path(__file__).parents[3]
PARTS = ("megackpt", "models", "examples", "tests", "docs")

WORDS = {
    "alike": "equal",
    "beneath": "in the sandbox, inside",
    "beside": "next to, in addition to, compared with",
    "donor": "source",
    "hear": "receive",
    "heard": "received",
    "hears": "receives",
    "holder": "owner",
    "holders": "owners",
    "holdings": "merged declarations",
    "lend": "borrow (zero-copy read)",
    "lending": "zero-copy read",
    "lends": "borrows",
    "lent": "borrowed",
    "meeting": "collective, synchronisation point",
    "meetings": "collectives",
    "mend": "repair, recover",
    "mended": "repaired, recovered",
    "mends": "repairs",
    "octet": "byte",
    "octets": "bytes",
    "outlive": "tolerate, survive",
    "outlived": "tolerated",
    "outlives": "tolerates, survives",
    "owed": "deferred",
    "parcel": "message, part",
    "parcels": "messages, parts",
    "piece": "part, chunk, range",
    "pieces": "parts, chunks, ranges",
    "refusal": "error",
    "refusals": "errors",
    "refuse": "reject, raise an error",
    "refused": "rejected, not supported",
    "refuses": "rejects, raises an error",
    "refusing": "rejecting",
    "torn": "incomplete",
    "vote": "comparison of replicas",
    "votes": "comparisons of replicas",
}
"""Words that must not stand anywhere: in a name, a docstring, a comment, an error or a document."""

SPOKEN = {"place", "places", "said", "say", "says", "tell", "tells", "told"}
"""Words that must not be a part of a name: ranks send and report, and values have paths and positions."""

NAMES = {*SPOKEN, "behind", "fills", "filling", "held"}
"""Words that must not be a part of a name that the package defines."""

TORCH_WORD = "in_place"
"""The only name of a place that stays: torch's own word."""

VAGUE_NAMES = {"all_", "each", "found", "given", "it", "mine", "one", "said"}
"""Names that say nothing about a value: no argument, local or attribute is called so."""

ERROR_CLASSES = {name for name in vars(errors) if name.endswith("Error")}
"""Errors that reach a user."""

ALLOWED = {
    "tests/core/texts/test_words.py",  # this list
    "tests/metrics.py",  # looks for some of them
}

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@cache
def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; names are split at underscores and capitals."""
    return re.findall(r"[a-z]+", _CAMEL.sub(" ", text).lower())


def defined_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield every name that a module defines, with its line."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@cache
def documents() -> dict[Path, str]:
    """Return the text of every file with words in it."""
    files = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for part in PARTS:
        files += [p for suffix in ("*.py", "*.md") for p in (ROOT / part).rglob(suffix)]
    return {path: path.read_text() for path in files if str(path.relative_to(ROOT)) not in ALLOWED}


def has_any(text: str) -> bool:
    """Return whether a text has letters of the list: few lines have to be split into words."""
    lower = text.lower()
    return any(word in lower for word in WORDS)


def test_no_word_of_the_list_is_used() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {word!r}; say {WORDS[word]}: {line}"
        for path, text in documents().items()
        if has_any(text)
        for line in filter(has_any, text.splitlines())
        for word in words_of(line)
        if word in WORDS
    ]
    assert faults == []


class Parsed(NamedTuple):
    """What a file has: names that it defines, docstrings, and texts of errors, each with its line."""

    names: list[tuple[str, int]]
    docstrings: list[tuple[int, str]]
    errors: list[tuple[int, str, str]]


@cache
def parsed(path: Path) -> Parsed:
    nodes = list(ast.walk(ast.parse(path.read_text())))  # not kept: they take a hundred times the memory
    return Parsed(list(defined_names(nodes)), list(docstrings_of(nodes)), list(error_texts(nodes)))


def names_in(*parts: str) -> list[tuple[str, str]]:
    """Return where each name in these folders is defined, and the name."""
    paths = [path for part in parts for path in sorted((ROOT / part).rglob("*.py"))]
    return [(f"{path.relative_to(ROOT)}:{line}", name) for path in paths for name, line in parsed(path).names]


def faults_of(names: Iterable[tuple[str, str]], words: set[str]) -> list[str]:
    """Return the names that have one of these words as a part."""
    return [f"{at}: {name}" for at, name in names if set(words_of(name.replace(TORCH_WORD, ""))) & words]


def test_no_name_of_the_package_has_a_word_of_the_list() -> None:
    names = [(at, name) for at, name in names_in("megackpt") if not at.startswith("megackpt/testing/")]
    assert faults_of(names, NAMES) == []


def test_no_name_of_tests_models_and_examples_has_a_spoken_word() -> None:
    assert faults_of(names_in("megackpt/testing", "models", "examples", "tests"), SPOKEN) == []


def test_no_local_has_a_vague_name() -> None:
    names = names_in("megackpt", "models", "examples", "tests")
    faults = [f"{at}: {name}" for at, name in names if name in VAGUE_NAMES]
    assert faults == []


@pytest.mark.parametrize("formula", [r'^(""")?Owns\b', r"Whether it is so\.", '"""Say whether'])
def test_no_docstring_uses_a_formula(formula: str) -> None:
    uses = re.compile(formula, re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path, text in documents().items() if uses.search(text)] == []


MAX_WORDS = 40
"""Words of one sentence in a docstring. A longer one has to be read twice."""

# The fields of a docstring, a table or an example: none of them is a part of a sentence.
_FIELD = re.compile(r"\s*(Args|Attributes|Raises|Returns|Yields):\s*$|\s{4,}[\w`., *]+: ")
_TABLE = re.compile(r"\s*(>>>|```|\|)|.*\S {3,}\S")


def sentences_of(docstring: str) -> Iterator[str]:
    """Yield the sentences of a docstring; a field, an item of a list and a line of a table are their own."""
    sentence: list[str] = []
    for line in [*docstring.splitlines(), ""]:
        is_new = not line.strip() or _FIELD.match(line) or _TABLE.match(line) or line.lstrip()[:2] == "* "
        if is_new and sentence:
            yield from re.split(r"(?<=[.!?:;]) ", " ".join(sentence))
            sentence = []
        if line.strip() and not _TABLE.match(line):
            sentence.append(line.strip())


def test_sentences_are_found_in_paragraphs_fields_and_lists() -> None:
    docstring = (
        "One. Two\ngoes on.\n\n    Args:\n        group: the ranks.\n* An item\n  of two lines\n| a | b |"
    )
    assert list(sentences_of(docstring)) == [
        "One.", "Two goes on.", "Args:", "group:", "the ranks.", "* An item of two lines"
    ]  # fmt: skip


def docstrings_of(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with the line of what has it."""
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_no_sentence_of_a_docstring_has_to_be_read_twice() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sorted((ROOT / "megackpt").rglob("*.py"))
        for line, docstring in parsed(path).docstrings
        for sentence in sentences_of(docstring)
        if len(sentence.split()) > MAX_WORDS
    ]
    assert faults == []


def error_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """Yield line, class and text of each error of megackpt whose text is written where it is made."""
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
            continue
        text = node.args[0]
        if not (node.func.id in ERROR_CLASSES and isinstance(text, (ast.Constant, ast.JoinedStr))):
            continue
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        yield (
            node.lineno,
            node.func.id,
            "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts),
        )


def test_every_error_text_has_what_happened_and_how_to_fix_it() -> None:
    """A text of one clause cannot say both. What a placeholder stands for may be a clause."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {kind}: {text}"
        for path in sorted((ROOT / "megackpt").rglob("*.py"))
        if "testing" not in path.parts
        for line, kind, text in parsed(path).errors
        if not re.search(r"^{}|[.:;]\s.*\S|{}[.]?$", text, re.DOTALL)
    ]
    assert faults == []
