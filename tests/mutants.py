"""Change one line of the package at a time, and see which test fails.

    python tests/mutants.py FOLDER [--number 60] [--seed 0] [--levels default system] [--only 3 7]

FOLDER keeps what was found: which test runs which line (recorded once; needs `pip install coverage`),
private copies of the tree, and the results so far, so that a run that was stopped goes on. The checkout is
only read. A table in markdown is printed at the end.

A mutant is killed if a test fails, or takes far longer than it does without the mutant. Level `default`
runs the tests of tests/core and tests/training that reach the line, and those with real ranks, which may;
`system` those of tests/system and tests/contrib that may.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import coverage

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.reach import NOW, RECORD, SECONDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("plans/planning", "formats", "engine", "training/optim", "training/parallel", "comm")
AT_LEAST = 6  # mutants of each package
DEFAULT = ("tests/core", "tests/training")
REAL_RANKS = "tests/core/test_real_ranks.py"
LIMIT_S = {"default": 1500.0, "system": 900.0}  # of one mutant; each test has a shorter one of its own

# Where the tests of real ranks and of other libraries are that run a package.
SYSTEM: dict[str, tuple[str, ...]] = {
    "plans/planning": ("tests/system/ranks", "tests/system/training"),
    "formats": ("tests/system/faults", "tests/system/ranks", "tests/system/attacks", "tests/contrib/torch"),
    "engine": ("tests/system/ranks", "tests/system/faults"),
    "training/optim": ("tests/system/training", "tests/contrib/torch", "tests/contrib/apex"),
    "training/parallel": ("tests/system/training", "tests/system/examples", "tests/contrib/transformers"),
    "comm": ("tests/system/ranks", "tests/system/faults"),
}

FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = ("log.", "_log.", "warnings.", "notice(")  # calls whose arguments are texts for a person


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: the text from start to stop, each (line, byte of the line), becomes `new`."""

    file: str
    start: tuple[int, int]
    stop: tuple[int, int]
    old: str
    new: str

    @property
    def package(self) -> str:
        """The package of the file, as "plans/planning"."""
        return next(package for package in PACKAGES if self.file.startswith(f"megackpt/{package}/"))

    def apply(self, tree: Path) -> None:
        """Change the file in a tree that is private to this mutant."""
        lines = (tree / self.file).read_bytes().splitlines(keepends=True)
        (first, begin), (last, end) = self.start, self.stop
        lines[first - 1 : last] = [lines[first - 1][:begin] + self.new.encode() + lines[last - 1][end:]]
        (tree / self.file).write_bytes(b"".join(lines))


@dataclass(slots=True, kw_only=True)
class Result:
    """Which test killed a mutant, by level; "" at a level that it survived."""

    killer: dict[str, str] = field(default_factory=dict)


def changes(node: ast.AST) -> Iterator[str]:
    """Yield what a node may become, as source."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in FLIPPED:
            new.ops[0] = FLIPPED[type(op)]()  # type: ignore[call-overload]
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in FLIPPED:
            new.op = FLIPPED[type(op)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            new = operand
        case ast.Constant(value=bool(value)):
            new = ast.Constant(not value)
        case ast.Constant(value=int(value)):
            new = ast.Constant(1 - value if value in (0, 1) else value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAME:
            new.func = ast.Name(OTHER_NAME[name])
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            new = ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call()):
            new = ast.Pass()
        case _:
            return
    yield ast.unparse(new)


def mutated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is below it, as far as it decides what a program does.

    Left out are annotations, decorators, the guards `assert` and `strict=`, and texts.
    """
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith(LOGS):
        return
    yield node
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return
    left_out = {"annotation", "returns", "decorator_list", "type_comment"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            guard = isinstance(child, ast.keyword) and child.arg == "strict"
            if isinstance(child, ast.AST) and name not in left_out and not guard:
                yield from mutated(child)


def mutants_of(file: Path, root: Path) -> Iterator[Mutant]:
    """Yield every change of a file."""
    source = file.read_bytes()
    for node in mutated(ast.parse(source)):
        statement = isinstance(node, (ast.Raise, ast.Expr, ast.Return))
        for new in changes(node):
            assert isinstance(node, (ast.expr, ast.stmt))
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            if statement or node.lineno == node.end_lineno:
                yield Mutant(
                    file=str(file.relative_to(root)),
                    start=(node.lineno, node.col_offset),
                    stop=(node.end_lineno, node.end_col_offset),
                    old=ast.unparse(node),
                    new=new,
                )


def shares(root: Path, number: int) -> dict[str, int]:
    """Divide the mutants over the packages: some for each, the others in proportion to their lines."""
    lines = {
        name: sum(f.read_bytes().count(b"\n") for f in (root / "megackpt" / name).rglob("*.py"))
        for name in PACKAGES
    }
    fixed: set[str] = set()
    while True:
        free = {name: count for name, count in lines.items() if name not in fixed}
        left = number - AT_LEAST * len(fixed)
        exact = {name: left * count / sum(free.values()) for name, count in free.items()}
        small = {name for name, share in exact.items() if share < AT_LEAST}
        if not small:
            break
        fixed |= small
    whole = dict.fromkeys(fixed, AT_LEAST) | {name: int(share) for name, share in exact.items()}
    by_rest = sorted(exact, key=lambda name: int(exact[name]) - exact[name])
    for name in by_rest[: number - sum(whole.values())]:
        whole[name] += 1
    return {name: whole[name] for name in PACKAGES}


def draw(root: Path, *, number: int, seed: int) -> list[Mutant]:
    """Draw mutants: a line of a package first, then one of the changes of that line."""
    drawn: list[Mutant] = []
    for package, share in shares(root, number).items():
        by_line: dict[tuple[str, int], list[Mutant]] = {}
        for file in sorted((root / "megackpt" / package).rglob("*.py")):
            for mutant in mutants_of(file, root):
                by_line.setdefault((mutant.file, mutant.start[0]), []).append(mutant)
        dice = random.Random(f"{seed} {package}")
        drawn += [dice.choice(by_line[line]) for line in dice.sample(sorted(by_line), share)]
    return drawn


class Records:
    """Which tests of the default level run which line, and how long each takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "record"
        self.seconds: dict[str, float] = {}

    def complete(self, base: Path) -> None:
        """Record the test files that are new or changed, two at a time; then read everything."""
        self._folder.mkdir(exist_ok=True)
        paths = [path for level in DEFAULT for path in (base / level).rglob("test_*.py")]
        files = {str(path.relative_to(base)): zlib.crc32(path.read_bytes()) for path in paths}
        list_of_files = self._folder / "recorded.json"
        recorded = json.loads(list_of_files.read_text()) if list_of_files.exists() else {}
        missing = sorted(file for file, checksum in files.items() if recorded.get(file) != checksum)
        if missing:
            command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *missing]
            command += ["-p", "tests.support.reach", "-p", "no:cacheprovider"]
            environment = {**os.environ, "PYTHONPATH": str(base), RECORD: str(self._folder)}
            subprocess.run(command, cwd=base, env=environment, check=False)
            list_of_files.write_text(json.dumps(files))
        self._lines = []
        for path in sorted(self._folder.glob("*.lines"), key=lambda path: path.stat().st_mtime):
            data = coverage.CoverageData(str(path))
            data.read()
            self._lines.append(data)
            newer = json.loads(path.with_suffix(".json").read_text())
            again = {_file_of(test) for test in newer}  # a file that changed may have lost tests
            self.seconds = {t: s for t, s in self.seconds.items() if _file_of(t) not in again} | newer
        (self._folder / "seconds.all").write_text(json.dumps(self.seconds))

    def reaching(self, mutant: Mutant, base: Path) -> list[str]:
        """Return the tests that run a line of the mutant, the quickest first; then those with real ranks.

        A line that only an import or another process runs is reached by tests that run anything of its file.
        What other processes run is not recorded, so the tests with real ranks may run any line.
        """
        at_line: set[str] = set()
        in_file: set[str] = set()
        for data in self._lines:
            contexts = data.contexts_by_lineno(str(base / mutant.file))
            for line, tests in contexts.items():
                in_file |= set(tests)
                if mutant.start[0] <= line <= mutant.stop[0]:
                    at_line |= set(tests)
        known = (at_line & self.seconds.keys()) or (in_file & self.seconds.keys())
        with_ranks = [test for test in self.seconds if _file_of(test) == REAL_RANKS and test not in known]
        return sorted(known, key=lambda test: (self.seconds[test], test)) + sorted(with_ranks)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def system_files(mutant: Mutant, base: Path) -> list[str]:
    """Return the test files of real ranks that may run a mutant, those that name its module first."""
    module = Path(mutant.file).stem
    words = {word for word in module.split("_") if len(word) > 3}
    files = [f for folder in SYSTEM[mutant.package] for f in sorted((base / folder).rglob("test_*.py"))]
    ranked = sorted(files, key=lambda f: -sum(word in f.read_text() for word in {module, *words}))
    return [str(f.relative_to(base)) for f in ranked]


def run_tests(tree: Path, tests: list[str], *, seconds: Path, limit_s: float) -> str:
    """Run tests in a tree until one fails, and return that one; "" if all pass."""
    now = tree.parent / f"{tree.name}.now"
    now.write_text("")
    listed = tree.parent / f"{tree.name}.tests"
    listed.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"@{listed}"]
    command += ["-p", "tests.support.reach", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [f"--basetemp={tree.parent / tree.name}.tmp"]
    environment = {**os.environ, "PYTHONPATH": str(tree), NOW: str(now), SECONDS: str(seconds)}
    with (tree.parent / f"{tree.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        began = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
        with contextlib.suppress(ProcessLookupError):  # the ranks and writers that it started, too
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code in (0, 5):
        return ""
    hung = now.with_suffix(".hang").exists() and now.with_suffix(".hang").read_text().startswith("Timeout")
    late = time.monotonic() - began >= limit_s
    return (now.read_text() or "import") + (" (hangs)" if hung or late else "")


def try_mutant(mutant: Mutant, tests: list[str], *, folder: Path, name: str, limit_s: float) -> str:
    """Run tests against a mutant in a copy of its own; return the test that kills it, or ""."""
    tree = folder / "trees" / name
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(folder / "base", tree, symlinks=True)
    mutant.apply(tree)
    try:
        return run_tests(tree, tests, seconds=folder / "record" / "seconds.all", limit_s=limit_s)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(f"{tree}.tmp", ignore_errors=True)


def table(mutants: list[Mutant], results: dict[int, Result]) -> str:
    """Return the results as markdown, with totals."""
    rows = ["| # | place | change | killed by |", "|---|---|---|---|"]
    totals: Counter[tuple[str, str]] = Counter()
    for number, mutant in enumerate(mutants):
        killer = next(((level, test) for level, test in results[number].killer.items() if test), None)
        old, new = (" ".join(text.split()).replace("|", "\\|")[:60] for text in (mutant.old, mutant.new))
        fate = f"{killer[0]}: {killer[1]}" if killer else "nothing"
        rows.append(f"| {number} | {mutant.file[9:]}:{mutant.start[0]} | `{old}` -> `{new}` | {fate} |")
        totals[mutant.package, killer[0] if killer else "nothing"] += 1
    rows.append("")
    for package in PACKAGES:
        rows.append(f"{package}: " + ", ".join(f"{k[1]} {n}" for k, n in totals.items() if k[0] == package))
    return "\n".join(rows)


def main() -> None:
    """Draw, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", nargs="+", choices=("default", "system"), default=["default", "system"])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants to run again")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants are tried at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    (folder / "trees").mkdir(parents=True, exist_ok=True)
    base = folder / "base"
    for link in [path for path in base.rglob("*") if path.is_symlink()]:
        link.unlink()  # copytree replaces files, and no links
    without = shutil.ignore_patterns(".git", ".mypy_cache", ".hypothesis")
    shutil.copytree(ROOT, base, symlinks=True, ignore=without, dirs_exist_ok=True)
    mutants = draw(base, number=options.number, seed=options.seed)
    stored = folder / f"results-{options.seed}-{options.number}.json"
    earlier = json.loads(stored.read_text()) if stored.exists() else {}
    results = {n: Result(**earlier.get(str(n), {})) for n in range(len(mutants))}
    if options.list:
        print(table(mutants, results))
        return
    records = Records(folder)
    records.complete(base)

    def run_one(number: int) -> None:
        mutant, killer = mutants[number], results[number].killer
        for level in options.levels:
            again = options.only is not None or level not in killer
            if not again or (level == "system" and killer.get("default")):
                continue
            tests = records.reaching(mutant, base) if level == "default" else system_files(mutant, base)
            name = f"{number}-{level}"
            killer[level] = ""
            if tests:
                killer[level] = try_mutant(mutant, tests, folder=folder, name=name, limit_s=LIMIT_S[level])
            print(number, level, f"{len(tests)} tests:", killer[level] or "nothing", flush=True)
            stored.write_text(json.dumps({n: asdict(result) for n, result in results.items()}))

    def cost(number: int) -> float:
        return sum(records.seconds[test] for test in records.reaching(mutants[number], base))

    numbers = options.only if options.only is not None else sorted(range(len(mutants)), key=cost)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run_one, numbers))
    print(table(mutants, results))


if __name__ == "__main__":
    main()
