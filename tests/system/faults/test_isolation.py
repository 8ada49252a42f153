"""Files in the current directory that are named like modules are imported by no process of ours."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megackpt.comm.child_processes import without_current_directory
from megackpt.engine.background.child_process import search_path
from megackpt.testing.ranks import RankPool

NAMES = [
    "abc", "argparse", "base64", "codecs", "contextlib", "ctypes", "encodings", "enum", "functools",
    "importlib", "inspect", "io", "json", "logging", "megackpt", "multiprocessing", "numpy", "os",
    "pickle", "queue",
    "random", "re", "safetensors", "select", "signal", "site", "sitecustomize", "socket", "struct",
    "subprocess", "threading", "torch", "traceback", "types", "typing", "usercustomize", "warnings", "xxhash",
]  # fmt: skip
POISON = """
import sys
with open({marks!r} + "/" + __name__, "w") as out:
    out.write(" ".join(sys.orig_argv))
raise ImportError("a module of the current directory is imported")
"""


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A directory with a file for each name; each leaves a mark if it is imported."""
    marks = tmp_path / "marks"
    marks.mkdir()
    directory = tmp_path / "run"
    directory.mkdir()
    for name in NAMES:
        (directory / f"{name}.py").write_text(POISON.format(marks=str(marks)))
    return directory


def _marks(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (directory.parent / "marks").iterdir()}


SCRIPT = """
import os, sys
import torch
from megackpt import AsyncOptions, Checkpointer, ShardedTensor

def main():
    sys.path.insert(0, {entry!r})  # as python -c, python -m and an interactive session have it
    checkpointer = Checkpointer({root!r}, async_save=True)
    del sys.path[0]
    with checkpointer:
        weight = ShardedTensor.from_rank_offsets("w", torch.ones(1000))
        checkpointer.save(1, {{"w": weight, "lr": 0.1}})
    print(Checkpointer({root!r}).steps())

main()
"""


@pytest.mark.parametrize("entry", ["", "."])
def test_a_writer_process_takes_nothing_from_the_current_directory(
    poisoned: Path, tmp_path: Path, entry: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(tmp_path / "steps"), entry=entry))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=poisoned, env=env, capture_output=True, text=True, timeout=300
    )
    assert ran.stdout.strip() == "(1,)", ran.stderr
    assert _marks(poisoned) == {}


def test_the_console_script_takes_nothing_from_the_current_directory(poisoned: Path) -> None:
    program = Path(sys.executable).parent / "megackpt"
    if not program.exists():
        pytest.skip("the command megackpt is not installed with this interpreter")
    for words in (["--help"], ["ls", str(poisoned)]):
        ran = subprocess.run(
            [str(program), *words], cwd=poisoned, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode in (0, 1), ran.stderr
        assert "Traceback" not in ran.stderr
    assert _marks(poisoned) == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot be told to leave it out")
def test_processes_of_multiprocessing_take_nothing_from_it(
    poisoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(poisoned)
    pool = RankPool()
    try:
        assert pool.run(_flag, 1) == [None]
    finally:
        pool.close()
    assert _marks(poisoned) == {}
    assert "PYTHONSAFEPATH" not in os.environ


def test_threads_may_start_processes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "yes")
    with contextlib.ExitStack() as first:
        first.enter_context(without_current_directory())
        with contextlib.ExitStack() as second:
            second.enter_context(without_current_directory())
            first.close()  # it entered before, and leaves before
            assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ["PYTHONSAFEPATH"] == "yes"
    monkeypatch.delenv("PYTHONSAFEPATH")

    def enter_often(_: int) -> None:
        for _ in range(300):
            with without_current_directory():
                assert os.environ["PYTHONSAFEPATH"] == "1"
                time.sleep(0)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(enter_often, range(8)))
    assert "PYTHONSAFEPATH" not in os.environ


def _flag() -> str | None:
    return os.environ.get("PYTHONSAFEPATH")


def test_the_current_directory_comes_last_and_does_not_matter_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "sub").mkdir()
    monkeypatch.setattr(sys, "path", ["", "sub", str(tmp_path), "/usr/lib/x", str(tmp_path / "link"), "/y"])
    here = os.path.realpath(tmp_path)
    assert search_path() == [str(tmp_path / "sub"), "/usr/lib/x", "/y", here]
    monkeypatch.setattr(sys, "path", ["/usr/lib/x", "/y"])
    assert search_path() == ["/usr/lib/x", "/y"]
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "sub").rmdir()
    monkeypatch.setattr(sys, "path", ["", "/x"])
    assert search_path() == ["/x"]
