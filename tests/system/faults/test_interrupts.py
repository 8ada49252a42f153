"""KeyboardInterrupt at any line of megackpt: nothing hangs, and the next save works.

A trace function raises it when a line of the package is reached, as Ctrl-C would between two lines. One kind
of event is left out: Python reports the line of a `with` statement again when its block is left, before the
context manager's `__exit__` is called. No statement can protect itself from an exception there, and no signal
arrives there: the interpreter looks for signals after calls, at the start of functions and in loops, and the
`__exit__` of a lock is one call in C.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import gc
import itertools
import linecache
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, get_args

import pytest
import torch.distributed as dist

import megackpt
from megackpt import AsyncOptions, Checkpointer, CheckpointError, ShardedTensor
from megackpt.testing.ranks import RankPool
from tests.support.effort import few, tries_all
from tests.support.states import filled
from tests.support.writers import open_saver_of, wait_for, wait_for_writers

Work = Literal["save", "first async save", "async save", "waves", "behind", "wait", "close", "load"]

SAMPLE = 6
TIMEOUT_S = 6.0
HANGS_S = 240
"""From here on it is a hang: 20 times what an idle machine takes, of which most is the time-out."""
_HERE = os.path.dirname(megackpt.__file__) + os.sep
_TESTING = os.path.join(_HERE, "testing") + os.sep


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[list[Any]]:
    """Raise KeyboardInterrupt at a line of megackpt; yields how many lines were reached, and the place."""
    seen: list[Any] = [0, ""]

    def of_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not releases_lock(frame.f_code, frame.f_lasti, frame.f_lineno):
            seen[0] += 1
            if seen[0] > after:
                seen[1] = f"{frame.f_code.co_filename.removeprefix(_HERE)}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return of_line

    def of_call(frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return of_line if name.startswith(_HERE) and not name.startswith(_TESTING) else None

    sys.settrace(of_call)
    try:
        yield seen
    finally:
        sys.settrace(None)


@cache
def releases_lock(code: CodeType, offset: int, line: int) -> bool:
    """Whether a line event at this instruction is that of a block `with lock:` that is left."""
    if not re.match(r"\s*with [\w.]*lock:", linecache.getline(code.co_filename, line), re.IGNORECASE):
        return False
    rest = (i for i in dis.get_instructions(code) if i.offset >= offset)
    of_line = itertools.takewhile(lambda i: i.offset == offset or not i.starts_line, rest)
    return not any(i.opname in ("BEFORE_WITH", "SETUP_WITH") for i in of_line)


def state(value: float) -> dict[str, Any]:
    return {"w": filled(value, 3000), "b": filled(value, 7, key="b"), "step": int(value)}


def out_of_time(signum: int, frame: FrameType | None) -> None:
    raise AssertionError("hangs")


class Trial:
    """One kind of work, interrupted again and again, each time at another line."""

    def __init__(self, work: Work, root: Path) -> None:
        self.work, self.root = work, root
        self.values = itertools.count(1)
        self.checkpointer: Checkpointer | None = None

    def made(self) -> Checkpointer:
        options = AsyncOptions(nice=0)
        if self.work == "waves":
            options = AsyncOptions(nice=0, staging_bytes=8192)
        elif self.work == "behind":
            options = AsyncOptions(nice=0, stage_in_background=True)
        is_async = self.work not in ("save", "load")
        return Checkpointer(self.root, keep_last=2, async_save=options if is_async else False)

    def prepare(self) -> None:
        """Bring about what the work begins with."""
        if self.work == "first async save":
            if self.checkpointer is not None:
                self.checkpointer.close()
            self.checkpointer = None
        elif self.checkpointer is None:
            self.checkpointer = self.made()
        if self.checkpointer is not None and self.work in ("load", "wait", "close"):
            value = next(self.values)
            self.checkpointer.save(value, state(value))

    def act(self) -> None:
        if self.work == "first async save":
            self.checkpointer = self.made()
        assert self.checkpointer is not None
        if self.work == "load":
            self.checkpointer.load(state(0))
        elif self.work == "wait":
            self.checkpointer.wait()
        elif self.work == "close":
            self.checkpointer.close()
        else:
            value = next(self.values)
            self.checkpointer.save(value, state(value))

    def recover(self, number: int) -> None:
        """Do what a user may do next: save, forget the Checkpointer, or wait and save."""
        if self.checkpointer is None:
            self.checkpointer = self.made()
        if number % 25 == 0 and self.work not in ("save", "load"):
            self.checkpointer = None  # what is under way is waited for, as at the end of the interpreter
            gc.collect()
            self.checkpointer = self.made()
        elif number % 2:
            with contextlib.suppress(CheckpointError):
                self.checkpointer.wait()
        value = next(self.values)
        try:
            self.checkpointer.save(value, state(value))
        except CheckpointError as error:  # that of the save that was interrupted
            if "KeyboardInterrupt" not in str(error):
                raise
            self.checkpointer.save(value, state(value))
        self.checkpointer.wait()
        if self.checkpointer.latest() != value:
            raise AssertionError(f"{self.checkpointer.latest()} is the newest step, not {value}")
        if not bool(self.checkpointer.load(state(0))["w"].eq(value).all()):
            raise AssertionError("something else was saved")


def interrupt(work: Work, root: Path, sample: int | None) -> list[str]:
    """Interrupt the work at its lines, all or a sample of them; return what goes wrong."""
    trial, wrong = Trial(work, root), []
    signal.signal(signal.SIGALRM, out_of_time)
    trial.prepare()
    trial.act()  # lines of imports are not counted
    trial.recover(1)
    trial.prepare()
    with interrupted(1 << 60) as seen:
        trial.act()
    lines = list(range(seen[0] + seen[0] // 10))  # it differs from run to run
    if sample is not None:
        lines = sorted(random.Random(0).sample(lines, min(sample, len(lines))))
    hit = 0
    for number in lines:
        where = ""
        signal.alarm(HANGS_S)
        try:
            trial.recover(1) if trial.checkpointer is None and work == "load" else None
            trial.prepare()
            try:
                with interrupted(number) as seen:
                    trial.act()
            except KeyboardInterrupt:
                hit += 1
            where = seen[1]
            trial.recover(number)
        except BaseException as error:  # noqa: BLE001 - told, and the next line is tried
            signal.alarm(0)
            message = traceback.format_exc()[-1500:]
            wrong.append(f"{work}: line {number} at {where}: {type(error).__name__}: {error}\n{message}")
            saver = open_saver_of(trial.checkpointer) if trial.checkpointer is not None else None
            if saver is not None:
                saver._session.writer.kill()
            trial.checkpointer = None
            if len(wrong) > 8:
                break
        finally:
            signal.alarm(0)
    print(f"{work}: interrupted at {hit} of {seen[0]} lines, {len(wrong)} wrong", flush=True)
    if trial.checkpointer is not None:
        trial.checkpointer.close()
    return wrong


@pytest.mark.parametrize("work", get_args(Work))
def test_ctrl_c_at_any_line_lets_nothing_hang_and_the_next_save_works(
    rank_pool: RankPool, tmp_path: Path, work: Work
) -> None:
    sample = None if tries_all() else SAMPLE
    (wrong,) = rank_pool.run(interrupt, 1, work, tmp_path, sample, timeout_s=3000)
    assert wrong == []


def part(value: float) -> ShardedTensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    return filled(value, 1000, rank=rank, ranks=size)


def interrupt_one_of_two(work: str, root: Path, number: int) -> tuple[str, float, tuple[int, ...]]:
    """Interrupt rank 1, which then sits there; return what each has raised, after how long, and the steps."""
    is_interrupted = dist.get_rank() == 1
    options = AsyncOptions(nice=0) if work == "async save" else False
    checkpointer = Checkpointer(root, async_save=options, timeout_s=TIMEOUT_S)
    if options:
        wait_for_writers(checkpointer)
    dist.barrier()
    checkpointer.save(1, {"w": part(1.0)})
    checkpointer.wait()
    dist.barrier()
    message = ""
    began = time.monotonic()
    try:
        with interrupted(number) if is_interrupted else contextlib.nullcontext():
            if work == "load":
                checkpointer.load({"w": part(0.0)})
            else:
                checkpointer.save(2, {"w": part(2.0)})
        if not is_interrupted:
            checkpointer.wait()
    except (CheckpointError, KeyboardInterrupt) as error:
        message = f"{type(error).__name__}: {error}"
    elapsed = time.monotonic() - began
    if not is_interrupted:
        (root.parent / "over").touch()
    else:
        wait_for((root.parent / "over").exists, HANGS_S)
    with contextlib.suppress(CheckpointError):
        checkpointer.close()
    return message, elapsed, tuple(checkpointer.steps()) if not is_interrupted else ()


def test_ctrl_c_on_one_rank_lets_no_other_hang(rank_pool: RankPool, tmp_path: Path) -> None:
    chance = random.Random(0)
    for case in range(few(1, of=60)):
        work = chance.choice(["save", "async save", "load"])
        number = chance.randrange(1200)
        (tmp_path / str(case)).mkdir()
        root = tmp_path / str(case) / "root"
        outcomes = rank_pool.run(interrupt_one_of_two, 2, work, root, number, timeout_s=2 * HANGS_S)
        print(work, number, outcomes)
        (message, elapsed, steps), (interrupted_by, _, _) = outcomes
        assert elapsed < HANGS_S, (work, number)
        if message:
            assert interrupted_by.startswith("KeyboardInterrupt"), (work, number, outcomes)
            assert "rank(s) 1" in message or "rank 1" in message.lower(), (work, number, message)
        elif work != "load":
            assert steps == (1, 2), (work, number)


def test_no_block_enters_a_condition() -> None:
    """`Condition.__exit__` is Python code: Ctrl-C in it keeps the lock. The `__exit__` of a lock is in C."""
    entered = []
    for path in Path(_HERE).rglob("*.py"):
        if "testing" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        conditions = {
            ast.unparse(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and "threading.Condition(" in ast.unparse(node.value)
        }
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
        entered += [
            f"{path}:{block.lineno}"
            for block in blocks
            for item in block.items
            if ast.unparse(item.context_expr) in conditions
        ]
    assert entered == []
