"""What Megatron's own packages import from its dist_checkpointing, private names too: facts, and a table.

    python tests/contrib/megatron/imports_table.py facts CHECKOUT_OR_WHEEL 0.16.1   # write the facts

The facts are names only: which name of which module, and by which modules of `megatron/` outside of
`dist_checkpointing` it is imported. The table is part of docs/megatron-compat.md, which api_table.py writes.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

FACTS = Path(__file__).parent / "facts"
PACKAGE = "megatron.core.dist_checkpointing"
# Tags of the public repository; of 0.19.2, the newest version of the package index, the wheel.
IMPORT_VERSIONS = ("0.12.1", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2")
Imports = dict[str, list[str]]


def imports_of(root: Path) -> Imports:
    """Return each imported name, qualified within dist_checkpointing, and the modules that import it."""
    imports: dict[str, set[str]] = {}
    for path in sorted((root / "megatron").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if ".".join(parts[:3]) == PACKAGE:
            continue
        package = parts[:-1]
        for name in _imported(ast.parse(path.read_text()), package):
            if name.startswith(PACKAGE + "."):
                module = ".".join(parts).removesuffix(".__init__")
                imports.setdefault(name.removeprefix(PACKAGE + "."), set()).add(module)
    return {name: sorted(modules) for name, modules in sorted(imports.items())}


def _imported(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the absolute name of everything that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def load_imports(version: str) -> Imports:
    """Return the stored facts of a version."""
    imports: Imports = json.loads((FACTS / f"megatron-imports-{version}.json").read_text())
    return imports


def table(verdicts: dict[str, str]) -> list[str]:
    """Return the table's lines; verdicts says what each name is here."""
    facts = {version: load_imports(version) for version in IMPORT_VERSIONS}
    lines = ["| name | versions | imported by | here |", "|---|---|---|---|"]
    for name in sorted({name for known in facts.values() for name in known}):
        versions = [version for version in IMPORT_VERSIONS if name in facts[version]]
        modules = facts[versions[-1]][name]
        shown = ", ".join(f"`{module.removeprefix('megatron.')}`" for module in modules[:2])
        more = f" and {len(modules) - 2} more" if len(modules) > 2 else ""
        lines.append(f"| `{name}` | {' '.join(versions)} | {shown}{more} | {verdicts[name]} |")
    return lines


def main(arguments: list[str]) -> None:
    """Write the facts of a version."""
    _, root, version = arguments
    text = json.dumps(imports_of(Path(root)), indent=1, sort_keys=True) + "\n"
    (FACTS / f"megatron-imports-{version}.json").write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
