"""Measure how much there is to read: size, imports, functions that run, records, call depth, names.

    python tests/metrics.py [ROOT]

SLOC are lines without blanks, comments and docstrings. The numbers are symptoms. The aim is code that is easy
to read.
"""

from __future__ import annotations

import ast
import io
import itertools
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
PACKAGE = ROOT / "megackpt"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.relative_to(PACKAGE).parts]
TREES = {path: ast.parse(path.read_text()) for path in FILES}
NAMES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
COMMENTED_PARTS = ("engine", "formats", "plans/planning", "plans/metadata", "comm")

# From `megackpt.save` to the system call that writes; each function calls the next one.
CALLS_OF_A_SAVE = (
    ("megackpt.run.collective", "save"),
    ("megackpt.engine.saving.save", "save_state"),
    ("megackpt.engine.saving.write", "write_and_commit"),
    ("megackpt.engine.saving.write", "write_chunks"),
    ("megackpt.formats.native.save", "NativeSaveStrategy.write_chunks"),
    ("megackpt.storage.store", "BufferedWriter.write"),
    ("megackpt.storage.file_writer", "FileWriter.write"),
    ("megackpt.storage.file_writer", "CachedOutput.append"),
    ("megackpt.storage.rawio", "write_fully"),
    ("os", "pwrite"),
)

# What `megackpt.save` and `megackpt.load` import in one process with the options that they have by default.
# tests/system/test_imports.py compares this with what they do import.
PLAIN_SAVE_AND_LOAD = [
    "megackpt",
    "megackpt.run.collective",
    "megackpt.formats.native",
    "megackpt.engine.saving.replica_samples",
]

# What the second save and the second load of a small state run: the first import what they need. A record is
# a dataclass of `engine/saving` that its steps hand to each other: not a hook, and not private to a file.
TRACED = """
import dataclasses, sys, tempfile, torch, megackpt
package = megackpt.__path__[0]
state = {"w": megackpt.ShardedTensor.from_rank_offsets("w", torch.ones(8, 8)), "step": 1}
def traced(act):
    ran, made = set(), set()
    def note(frame, event, _):
        code = frame.f_code
        # No lambdas and comprehensions, which are no functions to look up.
        if event == "call" and code.co_filename.startswith(package) and not code.co_name.startswith("<"):
            ran.add((code.co_filename, code.co_firstlineno))
        # The constructor of a dataclass is compiled from a string.
        if event == "call" and (code.co_filename, code.co_name) == ("<string>", "__init__"):
            made.add(type(frame.f_locals["self"]))
    sys.setprofile(note)
    act()
    sys.setprofile(None)
    of_saves = [c for c in made if c.__module__.startswith("megackpt.engine.saving.")]
    records = [c for c in of_saves if not c.__name__.startswith("_") and not c.__name__.endswith("Hook")]
    fields = sum(len(dataclasses.fields(record)) for record in records)
    return len(ran), len({file for file, _ in ran}), len(records), fields
with tempfile.TemporaryDirectory() as root:
    for act in (lambda: megackpt.save(state, root + "/c"), lambda: megackpt.load(state, root + "/c")):
        act()
        print(*traced(act))
"""

# A class name that is a bare participle, preposition or verb, and no noun of English.
NO_NOUN = re.compile(
    r"_?([A-Z][a-z]+(ed|ing)|Beside|Ahead|Earlier|Behind|Given|Found|Kept|Held|Torn|Told|Lends|Fills|Beneath|Below)"
)

NOUNS = {"Routing"}  # which experts each token goes to, as the field says


def code_and_comments(path: Path) -> tuple[int, int]:
    """Count lines of code, and lines that have only a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(TREES[path]):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        )
        if has_docstring:
            first = node.body[0]
            code -= set(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(code), len(comments - code)


def imports_of(path: Path, *, lazy: bool) -> set[str]:
    """Modules of the package that a file imports; lazy imports are those in functions and type checks."""
    modules: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module:
                names = [f"{child.module}.{alias.name}" for alias in child.names] + [child.module]
            modules.update(name for name in names if name in NAMES)
            is_function = isinstance(child, (ast.FunctionDef, ast.Lambda))
            is_check = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if lazy or not (is_function or is_check):
                visit(child)

    visit(TREES[path])
    return modules


def import_closure(start: list[str]) -> set[str]:
    """Return the modules that importing these imports, packages on the way included."""
    closure: set[str] = set()
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in closure or name not in NAMES:
            continue
        closure.add(name)
        waiting.extend(imports_of(NAMES[name], lazy=False))
        waiting.extend(".".join(name.split(".")[:n]) for n in range(2, name.count(".") + 1))
    return closure


def by_room(modules: Iterable[str]) -> dict[str, list[str]]:
    """Group modules by the folder of the package that they are in; "megackpt" for those in none."""
    rooms: dict[str, list[str]] = {}
    for name in sorted(modules):
        folder = "".join(name.split(".")[1:2])
        rooms.setdefault(folder if folder and (PACKAGE / folder).is_dir() else "megackpt", []).append(name)
    return rooms


def import_cycles() -> int:
    """Count groups of modules that import each other, by the algorithm of Tarjan.

    A package and its own modules do not count as a cycle.
    """
    edges = {
        name: {to for to in imports_of(path, lazy=True) if not name.startswith(to + ".")}
        for name, path in NAMES.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def connect(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for to in edges[node]:
            if to not in index:
                connect(to)
            if to in stack:
                low[node] = min(low[node], low[to])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[-len(component) :]
            if len(component) > 1:
                cycles.append(component)

    sys.setrecursionlimit(10_000)
    for node in edges:
        if node not in index:
            connect(node)
    for cycle in cycles:
        print("  cycle:", ", ".join(sorted(cycle)))
    return len(cycles)


def functions() -> Iterator[ast.FunctionDef]:
    """Yield every function of the package."""
    for tree in TREES.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def lines_without_docstring(node: ast.FunctionDef) -> int:
    """Return the lines of a function, those of its docstring left out."""
    lines = (node.end_lineno or 0) - node.lineno + 1
    first = node.body[0]
    return lines - ((first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0)


def classes() -> Iterator[ast.ClassDef]:
    """Yield every class of the package."""
    for tree in TREES.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def find_function(module: str, qualified: str) -> ast.FunctionDef:
    """Return a function of the package, or raise an error if there is none of that name."""
    body: list[ast.stmt] = TREES[NAMES[module]].body
    node: ast.stmt | None = None
    for name in qualified.split("."):
        node = next((n for n in body if getattr(n, "name", "") == name), None)
        body = getattr(node, "body", [])
    if not isinstance(node, ast.FunctionDef):
        raise SystemExit(f"{module} has no {qualified}: correct CALLS_OF_A_SAVE")
    return node


def check_calls() -> None:
    """Check that each function of CALLS_OF_A_SAVE uses the name of the next one."""
    for (module, qualified), (_, following) in itertools.pairwise(CALLS_OF_A_SAVE):
        nodes = list(ast.walk(find_function(module, qualified)))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {node.id for node in nodes if isinstance(node, ast.Name)}
        if following.rpartition(".")[2] not in used:
            raise SystemExit(f"{module}.{qualified} does not call {following}: correct CALLS_OF_A_SAVE")


def count_what_runs() -> tuple[list[str], str]:
    """Return how many functions, and in how many files, a plain save and a plain load run; and the records.

    The records are those of a save.
    """
    command = [sys.executable, "-c", TRACED]
    ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    rows = [line.split() for line in ran.stdout.splitlines()]
    return [f"{functions} ({files} files)" for functions, files, *_ in rows], "{} ({} fields)".format(
        *rows[0][2:]
    )


def main() -> None:
    """Print the numbers."""
    sizes = {path: code_and_comments(path) for path in FILES}
    closure = import_closure(PLAIN_SAVE_AND_LOAD)
    sloc = {name: sizes[NAMES[name]][0] for name in closure}
    print(f"modules that save and load import: {len(closure)} ({sum(sloc.values())} SLOC)")
    for room, modules in by_room(closure).items():
        print(f"  {room}: {len(modules)} ({sum(sloc[name] for name in modules)} SLOC)")
    check_calls()
    between = CALLS_OF_A_SAVE[1:-1]
    depth, files = len(between), len({module for module, _ in between})
    print(f"functions between save and the write call: {depth} ({files} files)")
    functions_of, records = count_what_runs()
    print(f"functions that a plain save and a plain load run: {' and '.join(functions_of)}")
    print(f"records of a plain save: {records}")
    print(f"package without testing: {sum(code for code, _ in sizes.values())} SLOC in {len(FILES)} files")
    no_nouns = sorted(c.name for c in classes() if NO_NOUN.fullmatch(c.name) and c.name not in NOUNS)
    print(f"classes named by no noun: {len(no_nouns)} of {sum(1 for _ in classes())} {' '.join(no_nouns)}")
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions())
    undocumented = sorted(lines_without_docstring(node) for node in functions())
    long_files = [path.name for path in FILES if len(path.read_text().splitlines()) > 400]
    for what, lines in (("", lengths), (" without docstrings", undocumented)):
        p95 = lines[int(0.95 * len(lines))]
        print(f"functions, lines{what}: median {statistics.median(lines)}, p95 {p95}, longest {lines[-1]}")
    print(f"files over 400 lines: {len(long_files)} {' '.join(long_files)}")
    print(f"import cycles, lazy imports included: {import_cycles()}")
    parts = [path for path in FILES if str(path.relative_to(PACKAGE)).startswith(COMMENTED_PARTS)]
    code, comments = (sum(sizes[path][i] for path in parts) for i in (0, 1))
    print(f"comments per 100 SLOC in {', '.join(COMMENTED_PARTS)}: {100 * comments / code:.1f}")


if __name__ == "__main__":
    main()
