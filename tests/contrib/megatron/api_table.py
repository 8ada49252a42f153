"""Every public name of Megatron-Core's dist_checkpointing, and what it is here: docs/megatron-compat.md.

    python tests/contrib/megatron/api_table.py page   # write the page from facts and our code
    python tests/contrib/megatron/api_table.py facts UNPACKED_WHEEL 0.16.1  # write names and signatures

A name is public if no part of it begins with an underscore. Loggers and type variables are left out, and so
are names that a module merely imports from another; what a package's `__init__` imports is its own.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megackpt.contrib.megatron.errors import is_unsupported_name
from tests.contrib.megatron import imports_table

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "megatron-compat.md"
FACTS = HERE / "facts"
VERSIONS = ("0.8.0", "0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
OURS = "megackpt.contrib.megatron.dist_checkpointing"
ALWAYS_RAISES = "Raises UnsupportedError"
MISSING = object()
LEFT_OUT = {"logger", "fallback_logger", "T", "U", "V"}


def _notes(section: str) -> dict[str, str]:
    """Return what a section of page_notes.md says of each name."""
    _, _, text = (HERE / "page_notes.md").read_text().partition(f"## {section}\n")
    lines = text.partition("\n## ")[0].strip().splitlines()
    return {name: note for name, _, note in (line.removeprefix("* `").partition("`: ") for line in lines)}


RENAMED, ABSENT, NOTES = _notes("Renamed"), _notes("Absent"), _notes("Others")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature; default is its source text, None without one."""

    name: str
    kind: str  # "", "*", "**" or "kw" for keyword-only
    default: str | None = None

    def __str__(self) -> str:
        star = self.kind if self.kind in ("*", "**") else ""
        return star + self.name + ("" if self.default is None else f"={self.default}")


Signature = tuple[Parameter, ...]


def render(signature: Signature) -> str:
    """Return a signature as text, `(a, *, b=1)`."""
    parts: list[str] = []
    for p in signature:
        if p.kind == "kw" and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(str(p))
    return f"({', '.join(parts)})"


def accepts(theirs: Signature, ours: Signature) -> bool:
    """Return whether every call that fits `theirs` fits `ours` and means the same."""
    named = {p.name: p for p in ours if p.kind in ("", "kw")}
    in_order = [p.name for p in ours if p.kind == ""]
    positional = [p for p in theirs if p.kind == ""]
    if [p.name for p in positional] != in_order[: len(positional)]:
        return False
    if any(star not in {p.kind for p in ours} for star in {p.kind for p in theirs} & {"*", "**"}):
        return False
    for p in theirs:
        if p.kind in ("", "kw") and (
            p.name not in named or (p.default is not None and named[p.name].default != p.default)
        ):
            return False
    known = {p.name for p in theirs}
    return all(p.default is not None for name, p in named.items() if name not in known)


# Facts: from source, without importing it.


def facts_of(root: Path) -> dict[str, dict[str, str]]:
    """Return kind and signature of every public name in a `dist_checkpointing` folder, by qualified name."""
    names_of_version: dict[str, dict[str, str]] = {}
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix("__init__").strip(".")
        for name, kind, signature in _names_in(
            ast.parse(path.read_text()), is_package=path.stem == "__init__"
        ):
            entry = {"kind": kind}
            if signature is not None:
                entry["signature"] = render(signature)
            names_of_version[f"{module}.{name}".strip(".")] = entry
    return names_of_version


def _names_in(tree: ast.Module, *, is_package: bool) -> Iterator[tuple[str, str, Signature | None]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, "function", _parameters(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, "class", _constructor(node)
            yield from _members(node)
        elif (
            isinstance(node, ast.ImportFrom)
            and is_package
            and (node.level or "compat" in (node.module or ""))
        ):
            yield from ((a.name, "re-export", None) for a in node.names if not a.name.startswith("_"))
        else:
            yield from ((name, "constant", None) for name in _assigned(node))


def _members(node: ast.ClassDef) -> Iterator[tuple[str, str, Signature | None]]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            is_property = any(ast.unparse(d) == "property" for d in member.decorator_list)
            kind = "property" if is_property else "method"
            yield f"{node.name}.{member.name}", kind, None if is_property else _parameters(member)
        elif any(ast.unparse(base) == "Enum" for base in node.bases):
            yield from ((f"{node.name}.{name}", "member", None) for name in _assigned(member))


def _assigned(node: ast.stmt) -> list[str]:
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if isinstance(targets[0], ast.Subscript):
        return []
    names = [t.id for target in targets for t in ast.walk(target) if isinstance(t, ast.Name)]
    return [n for n in names if not n.startswith("_") and n not in LEFT_OUT]


def _constructor(node: ast.ClassDef) -> Signature | None:
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _parameters(member)
    is_data = any("dataclass" in ast.unparse(d) for d in node.decorator_list)
    if is_data or any(ast.unparse(base) == "NamedTuple" for base in node.bases):
        fields = [m for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)]
        in_init = [f for f in fields if "init=False" not in ast.unparse(f)]
        return tuple(Parameter(ast.unparse(f.target), "", _field_default(f.value)) for f in in_init)
    return None


def _field_default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        arguments = {k.arg: ast.unparse(k.value) for k in value.keywords}
        return arguments.get("default", arguments.get("default_factory"))
    return None if value is None else ast.unparse(value)


def _parameters(node: ast.FunctionDef) -> Signature:
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(a.defaults)), *a.defaults]
    parameters = [Parameter(p.arg, "", _text(d)) for p, d in zip(positional, defaults, strict=True)]
    parameters += [Parameter(a.vararg.arg, "*")] if a.vararg else []
    parameters += [Parameter(p.arg, "kw", _text(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    parameters += [Parameter(a.kwarg.arg, "**")] if a.kwarg else []
    return tuple(parameters[1:] if parameters and parameters[0].name in ("self", "cls") else parameters)


def _text(default: ast.expr | None) -> str | None:
    return None if default is None else ast.unparse(default)


def parse_signature(text: str) -> Signature:
    """Return the signature that `render` gave as text."""
    node = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return _parameters(node)


def load_facts(version: str) -> dict[str, dict[str, str]]:
    """Return the stored facts of a version."""
    facts: dict[str, dict[str, str]] = json.loads((FACTS / f"megatron-core-{version}.json").read_text())
    return facts


# Ours: as it is when imported.


def find_ours(name: str) -> Any:
    """Return our object of a qualified name, whatever its value; MISSING if there is none."""
    parts = name.split(".")
    for cut in range(len(parts), -1, -1):
        module_name = ".".join([OURS, *parts[:cut]])
        try:
            member: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            continue
        for part in parts[cut:]:
            if is_unsupported_name(member):
                return member
            member = inspect.getattr_static(member, part, MISSING)
        return member
    return MISSING


def signature_of(member: Any) -> Signature | None:
    """Return the signature of our function, method or class, read from its source as theirs is."""
    member = getattr(member, "__func__", member)
    if isinstance(member, type):
        for cls in member.__mro__[:-1]:
            node = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
            assert isinstance(node, ast.ClassDef)
            signature = _constructor(node)
            if signature is not None:
                return signature
        return None
    if not inspect.isfunction(inspect.unwrap(member)):
        return None
    node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(member)))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return _parameters(node)


# The page.


@dataclass(frozen=True)
class Verdict:
    """What a name of Megatron-Core is here.

    Attributes:
        status: `same`, `wider`, `differs`, `unsupported`, `renamed`, `not offered`, or `gap`.
        note: what the reader needs to know of it.
    """

    status: str
    note: str = ""


def judge(name: str, fact: dict[str, str]) -> Verdict:
    """Compare one name of one version with ours."""
    member = find_ours(name)
    if member is MISSING:
        if name in RENAMED:
            return Verdict("renamed", RENAMED[name])
        return Verdict("not offered", ABSENT[name]) if name in ABSENT else Verdict("gap")
    if is_unsupported_name(member):
        if fact["kind"] in ("method", "property"):
            return Verdict("unsupported", "With its class.")
        because = member.reason[0].upper() + member.reason[1:]
        return Verdict("unsupported", f"{because} {member.alternative}")
    note = NOTES.get(name, "")
    if note.startswith(ALWAYS_RAISES):
        return Verdict("unsupported", note)
    if "signature" not in fact:
        return Verdict("same", note)
    theirs, ours = parse_signature(fact["signature"]), signature_of(member)
    if ours is None or (theirs and not ours):
        return Verdict("differs", f"`{fact['signature']}` there, no arguments here. {note}".strip())
    if ours == theirs:
        return Verdict("same", note)
    status = "wider" if accepts(theirs, ours) else "differs"
    return Verdict(status, f"`{render(ours)}` here, `{render(theirs)}` there. {note}".strip())


def judge_import(name: str) -> str:
    """Say what an imported name is here: `offered`, `raises when used` with its reason, or `missing`."""
    member = find_ours(name)
    if member is MISSING:
        return "missing"
    if is_unsupported_name(member):
        return f"raises when used: {member.reason} {member.alternative}"
    return "offered"


def write_page() -> str:
    """Return the page."""
    facts = {version: load_facts(version) for version in VERSIONS}
    modules: dict[str, list[str]] = {}
    for name in sorted({name for known in facts.values() for name in known}):
        modules.setdefault(_module_of(name, facts), []).append(name)
    lines = [(HERE / "page_head.md").read_text().rstrip(), ""]
    for module, names in sorted(modules.items()):
        title = f"dist_checkpointing.{module}".rstrip(".")
        lines += [f"## {title}", "", "| name | versions | here | |", "|---|---|---|---|"]
        lines += [_row(name, module, facts) for name in names]
        lines.append("")
    names = {
        name for version in imports_table.IMPORT_VERSIONS for name in imports_table.load_imports(version)
    }
    lines += [(HERE / "page_imports.md").read_text().rstrip(), ""]
    lines += imports_table.table({name: judge_import(name) for name in names})
    return "\n".join(lines).rstrip() + "\n"


def _module_of(name: str, facts: dict[str, dict[str, dict[str, str]]]) -> str:
    kind = next(known[name]["kind"] for known in facts.values() if name in known)
    return ".".join(name.split(".")[: -2 if kind in ("method", "property", "member") else -1])


def _row(name: str, module: str, facts: dict[str, dict[str, dict[str, str]]]) -> str:
    versions = [v for v in VERSIONS if name in facts[v]]
    verdicts = {v: judge(name, facts[v][name]) for v in versions}
    newest = verdicts[versions[-1]]
    notes = [newest.note] if newest.note else []
    for version in versions[:-1]:
        if verdicts[version].status not in (newest.status, "same", "wider"):
            notes.append(f"{version}: {verdicts[version].status}, {verdicts[version].note}")
    short = name.removeprefix(module).lstrip(".")
    shown = " ".join(v.rsplit(".", 1)[0] for v in versions)
    return f"| `{short}` | {shown} | {newest.status} | {' '.join(notes).replace('|', chr(92) + '|')} |"


def main(arguments: list[str]) -> None:
    """Run one of the two commands above."""
    if arguments == ["page"]:
        PAGE.write_text(write_page())
        return
    _, root, version = arguments
    facts = facts_of(Path(root) / "megatron" / "core" / "dist_checkpointing")
    FACTS.mkdir(exist_ok=True)
    (FACTS / f"megatron-core-{version}.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
