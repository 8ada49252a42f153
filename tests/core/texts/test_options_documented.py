"""Whatever can be set is named in docs/: options, arguments of a Checkpointer, flags of commands."""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import click
import pytest

from megackpt import CheckpointConfig, Checkpointer, options
from megackpt.cli.entry import COMMANDS
from tests.support.docs import CLASSES, PAGE, page

DOCS = Path(__file__).parents[3] / "docs"


def undocumented(names: list[str], text: str) -> list[str]:
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def test_the_page_of_options_has_the_text_of_the_docstrings() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.support.docs"


def test_no_class_of_options_is_missing_there() -> None:
    kinds = {kind for kind in vars(options).values() if isinstance(kind, type) and is_dataclass(kind)}
    assert kinds - CLASSES.keys() == set()


def test_every_argument_of_a_checkpointer_is_on_its_page() -> None:
    names = list(inspect.signature(Checkpointer).parameters)
    assert undocumented(names, (DOCS / "checkpointer.md").read_text()) == []


@pytest.mark.parametrize("name", ["CheckpointConfig", *COMMANDS])
def test_every_flag_and_every_knob_is_named_in_the_documents(name: str) -> None:
    names = [field.name for field in fields(CheckpointConfig)]
    if name in COMMANDS:
        command: click.Command = importlib.import_module(f"megackpt.cli.{name}").command
        names = [param.opts[0] for param in command.params if isinstance(param, click.Option)]
    assert undocumented(names, "\n".join(path.read_text() for path in DOCS.glob("*.md"))) == []
