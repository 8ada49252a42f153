"""The fenced blocks of the docs, and the pages that `python -m tests.support.docs` writes from the code."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import cleandoc, getdoc, signature
from pathlib import Path
from typing import Any, NamedTuple

import click

from megackpt import (
    AsyncOptions,
    KeepBest,
    KeyRule,
    LoadOptions,
    Retention,
    SaveOptions,
    SaveSchedule,
    Tiers,
    convert,
    diff,
    errors,
    import_deepspeed,
    import_torch,
    inspect,
    load,
    repair,
    save,
    verify,
)
from megackpt.cli.entry import COMMANDS, EPILOG, CommandWithSections
from megackpt.errors import CheckpointError
from megackpt.options import VerifyOptions
from megackpt.run.checkpointer import Groups, Tier
from megackpt.storage import FileOptions, ObjectOptions

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ON_RANKS = ROOT / "docs" / "coming-from.md"
"""The page whose blocks run on several ranks: tests/contrib/torch/test_coming_from.py."""
FENCE = re.compile(
    r"^(?P<margin> *)```(?P<kind>\w*)\n(?P<code>.*?)^(?P=margin)```$", re.DOTALL | re.MULTILINE
)


class Block(NamedTuple):
    """A fenced block."""

    kind: str  # the word after the fence, or ""
    code: str  # its lines
    line: int  # how many lines of the page come before them
    section: str  # the heading that it stands under, "" before the first of level 2
    lead: str  # the text between the heading or block before and this one

    @property
    def first_line(self) -> str:
        """The first line of the code."""
        return self.code.partition("\n")[0]


class Example(NamedTuple):
    """A python block, the number of its first line, and the output it is shown with, if any."""

    code: str
    line: int
    output: str | None


def blocks_of(text: str) -> list[Block]:
    """Return all fenced blocks of a page, in order."""
    blocks, end = [], 0
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        sections = re.findall(r"^## (.*)$", FENCE.sub("", before), re.MULTILINE)
        lead = re.split(r"^#+ .*$", text[end : fence.start()], flags=re.MULTILINE)[-1].strip()
        line = text.count("\n", 0, fence.start("code"))
        blocks.append(Block(fence["kind"], fence["code"], line, sections[-1] if sections else "", lead))
        end = fence.end()
    return blocks


def examples_of(text: str) -> list[Example]:
    """Return the python blocks; a `text` block right behind one is its output."""
    blocks = blocks_of(text)
    examples = []
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.kind == "python":
            has_output = following is not None and following.kind == "text" and not following.lead
            examples.append(
                Example(block.code, block.line, following.code if following and has_output else None)
            )
    return examples


def run(example: Example, path: Path, namespace: dict[str, Any]) -> str:
    """Execute a block; return what it prints, or the text of the error that it is shown with."""
    code = compile("\n" * example.line + example.code, str(path), "exec")  # lines count as in the document
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, namespace)
        except CheckpointError as error:
            if example.output is None:
                raise
            return f"{error}\n"
    return printed.getvalue()


def names_by_module() -> dict[str, list[str]]:
    """Return the public names that docs/names.md lists, by the module that they are imported from."""
    text = (ROOT / "docs" / "names.md").read_text()
    rows = re.findall(r"^\| `(megackpt\.[\w.]+)` \| .*? \| (.*) \|$", text, re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


FUNCTIONS: dict[Callable[..., object], str] = {
    save: "`megackpt.save`, and in part `Checkpointer.save`",
    load: "`megackpt.load`, `load_with_report`, and in part `Checkpointer.load`",
    inspect: "`megackpt.inspect`, and in part `megackpt inspect`",
    verify: "`megackpt.verify`, and in part `megackpt verify`",
    diff: "`megackpt.diff`, and in part `megackpt diff`",
    convert: "`megackpt.convert`, and in part `megackpt convert`",
    import_deepspeed: "`megackpt.import_deepspeed`, and in part `megackpt convert --from deepspeed`",
    import_torch: "`megackpt.import_torch`, and in part `megackpt convert --from torch`",
    repair: "`megackpt.repair`, and in part `megackpt repair`",
}
CLASSES: dict[type, str] = {
    SaveOptions: "`save(options=...)`, `Checkpointer(save_options=...)`",
    LoadOptions: "`load(options=...)`, `Checkpointer(load_options=...)`",
    KeyRule: "`LoadOptions(rules=(KeyRule(...),))`",
    Retention: "`Checkpointer(retention=...)`",
    KeepBest: "`Retention(keep_best=...)`",
    SaveSchedule: "`Checkpointer(schedule=...)`",
    AsyncOptions: "`Checkpointer(async_save=...)`",
    Tiers: "`Checkpointer(tiers=...)`",
    Tier: "`Tiers([MemoryTier(...), LocalTier(...)])`, which are both made of these",
    Groups: "`Checkpointer(group=...)`",
    ObjectOptions: "`Checkpointer(objects=...)`, `open_store(url, objects=...)`, of `megackpt.storage`",
    FileOptions: "`LocalStore(path, options=...)`, of `megackpt.storage`",
    VerifyOptions: "`megackpt.verify` and `Checkpointer(verify_after_save=True)`, which make one of these",
}

OPTIONS = """# Every option

After this page you know what can be set, where it is given, and its default; made from the docstrings by
`python -m tests.support.docs`. Options are frozen objects:

```python
from megackpt import Checkpointer, Retention, SaveOptions

checkpointer = Checkpointer("run", retention=Retention(keep_last=3), save_options=SaveOptions(timeout_s=60))
```

Arguments of a `Checkpointer` have a [table of their
own](checkpointer.md#options), and [commands](commands.md) have theirs. `CheckpointConfig`
of `megackpt.contrib.megatron.config`, names that users of Megatron-Core know, is in
[the page of Megatron-Core](megatron-compat.md#megatron-lms-knobs).
"""

COMMAND_LINE = """# Every command

After this page you know each argument and flag of `megackpt`; made from the help texts by
`python -m tests.support.docs`. [Tools](tools.md) says which command answers which question.

```sh
megackpt ls run --json
megackpt verify run --all --quiet
```

`--json` and `--quiet` (`-q`) may stand anywhere in a line of any command.
"""

ERRORS = """# Every error

After this page you know what an error means and what to do; made from the docstrings of `megackpt.errors` by
`python -m tests.support.docs`. The text of an error says what happened, where, and how to fix it:

```python
from megackpt import load

load({"step": 0}, "other")
```

```text
/data/other is not a checkpoint: it has no metadata.json. Either nothing was saved there, or the save \
did not finish. Give the directory of a finished save.
```

All errors of megackpt derive from `CheckpointError`. Each also derives from a builtin: `except
FileNotFoundError` catches this one. They have attributes `key`, `rank` and `path` if they apply.

If one rank fails in `save` or `load`, all ranks raise its error, with `Rank 2 failed while reading: ` before
the text. An error that follows from the declarations of all ranks together has no such prefix. [When
something goes wrong](operating.md) begins with lines of a log.
"""

_ENTRY = re.compile(r"^(?P<name>\w+): (?P<text>.*?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)


def options_page() -> str:
    """Return the text of docs/options.md."""
    parts = [OPTIONS]
    for function, receivers in FUNCTIONS.items():
        parameters = signature(function).parameters.values()
        defaults = {p.name: "" if p.default is p.empty else f"`{_shown(p.default)}`" for p in parameters}
        parts.append(_section(f"{function.__name__}()", receivers, _described(function, "Args"), defaults))
    for kind, receivers in CLASSES.items():
        defaults = {field.name: _default(field) for field in fields(kind) if field.init}
        parts.append(_section(kind.__name__, receivers, _described(kind, "Attributes"), defaults))
    return "\n".join(parts)


def _section(name: str, receivers: str, message: dict[str, str], defaults: dict[str, str]) -> str:
    lines = [f"## {name}", "", f"Given to {receivers}.", "", "| name | default | meaning |", "|---|---|---|"]
    missing = sorted(defaults.keys() - message.keys())
    assert not missing, f"{name}: the docstring has no line for {missing}"
    rows = [f"| `{option}` | {default} | {message[option]} |" for option, default in defaults.items()]
    return "\n".join([*lines, *rows, ""])


def _described(documented: object, section: str) -> dict[str, str]:
    """Return what a docstring says of each name in a section, as one line."""
    text = getdoc(documented) or ""
    body = re.search(rf"^{section}:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert body is not None, f"{documented} has no section {section}"
    entries = _ENTRY.finditer(cleandoc(body[1]))
    return {e["name"]: " ".join(e["text"].split()).replace("|", "\\|") for e in entries}


def _default(field: Field[object]) -> str:
    if field.default_factory is not MISSING:
        return f"`{_shown(field.default_factory())}`"
    return "" if field.default is MISSING else f"`{_shown(field.default)}`"


def _shown(value: object) -> str:
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} * 2**20"
    return str(value) if type(value).__module__.startswith("megackpt") else repr(value)


def commands_page() -> str:
    """Return the text of docs/commands.md."""
    parts = [COMMAND_LINE, f"{EPILOG.partition('help. ')[2]}\n"]
    for name in sorted(COMMANDS):
        command: click.Command = importlib.import_module(f"megackpt.cli.{name}").command
        parts.append(_command(name, command))
        inner = command.commands if isinstance(command, click.Group) else {}
        parts += [_command(f"{name} {part}", inner[part]) for part in sorted(inner)]
    return "\n".join(parts)


BAR = r"\|"
"""A vertical bar inside of a cell of a table."""
_LINE = re.compile(r"^((?:torchrun|megackpt) .*)$", re.MULTILINE)


def _command(name: str, command: click.Command) -> str:
    arguments = [param.metavar or str(param.name) for param in command.params if _is_argument(param)]
    paragraphs = cleandoc((command.help or "").replace("\b\n", "")).split("\n\n")
    text = [_LINE.sub(r"`\1`", " ".join(paragraph.split())) for paragraph in paragraphs]
    options = {str(param.name): param for param in command.params if isinstance(param, click.Option)}
    sections = command.sections if isinstance(command, CommandWithSections) else {}
    tables = [(title, [options.pop(n) for n in names]) for title, names in sections.items()]
    lines = [f"## {name}", ""]
    if arguments:
        lines += [f"Arguments: `{' '.join(arguments).upper()}`", ""]
    lines += ["\n\n".join(text)]
    for title, rows in [*tables, ("option", list(options.values()))]:
        if rows:
            lines += ["", f"| {title} | meaning |", "|---|---|", *map(_option, rows)]
    return "\n".join([*lines, ""])


def _is_argument(param: click.Parameter) -> bool:
    return isinstance(param, click.Argument)


def _option(option: click.Option) -> str:
    """Return the row of an option; not by click, whose versions show defaults in different ways."""
    names = " / ".join([*option.opts, *option.secondary_opts])
    value = option.metavar or option.type.name.partition(" ")[0].upper()
    if isinstance(option.type, click.Choice):
        value = "|".join(option.type.choices)
    shown = names if option.is_flag else f"{names} {value}"
    default = f" Default: `{option.default}`." if option.show_default else ""
    assert option.help, f"{shown} has no help text"
    cells = (f"`{shown}`", f"{option.help}{default}")
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def errors_page() -> str:
    """Return the text of docs/errors.md."""
    parts = [ERRORS]
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind is not CheckpointError:
            base = kind.__bases__[-1].__name__  # the builtin, or the error that it refines
            first, _, rest = (getdoc(kind) or "").partition("\n\n")
            text = _PAGE_NAME.sub(r"[\1](\1.md\2)", f"{first}\n\n{rest}")
            parts.append(f"## {name}\n\nAlso a `{base}`. {text}\n")
    return "\n".join(parts)


_PAGE_NAME = re.compile(r"docs/([\w-]+)\.md(#[\w-]+)?")

PAGES: dict[str, Callable[[], str]] = {
    "options.md": options_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
}
"""The pages of docs/ that are made from the code."""


if __name__ == "__main__":
    for name, make_page in PAGES.items():
        (ROOT / "docs" / name).write_text(make_page())
