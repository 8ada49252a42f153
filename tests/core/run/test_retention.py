"""Which steps are kept, when they are saved, what their directories are called, and which files they have."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megackpt import Checkpointer, MemoryTier, SaveSchedule, ShardedTensor, Tiers
from megackpt.comm import Group, SingleProcess
from megackpt.engine.checkpoint.origins import StepOrigin
from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.checkpoint.steps import StepFile, step_name
from megackpt.engine.saving.save_request import save_request
from megackpt.errors import DeclarationError
from megackpt.formats.strategy import MANIFEST
from megackpt.options import SaveOptions
from megackpt.run.checkpointer import KeepBest, Retention
from megackpt.run.checkpointer import checkpointer as checkpointer_module
from megackpt.run.checkpointer.branches import RunBranch
from megackpt.run.checkpointer.retention import decide, stale_leftovers
from megackpt.run.checkpointer.saving import DirectSaving, SaveFailures, ScheduledSaving
from megackpt.run.checkpointer.schedule import DestinationChoice, Destinations, SaveTrigger, SignalWatch
from megackpt.storage import LocalStore, MemoryStore
from megackpt.testing.world import SimulatedWorld

counts = st.none() | st.integers(1, 5)
steps = st.sets(st.integers(0, 30), max_size=12)


@given(
    committed=steps,
    pinned=steps,
    good=steps,
    last=counts,
    every=counts,
    best=st.none() | st.builds(KeepBest, metric=st.just("loss"), n=st.integers(1, 3)),
    losses=st.dictionaries(st.integers(0, 30), st.floats(width=16)),
)
def test_a_step_stays_exactly_if_something_asks_for_it(
    committed: set[int],
    pinned: set[int],
    good: set[int],
    last: int | None,
    every: int | None,
    best: KeepBest | None,
    losses: dict[int, float],
) -> None:
    retention = Retention(keep_last=last, keep_every=every, keep_best=best)
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    decision = decide(retention, committed, pinned=pinned, good=good, metrics=metrics)

    def better(step: int) -> int:
        """How many committed steps are better than one."""
        known = {s: v for s, v in losses.items() if s in committed and math.isfinite(v)}
        own_rank = (known[step], -step)
        return sum((value, -other) < own_rank for other, value in known.items())

    for step in committed:
        newer = sum(other > step for other in committed)
        stays = newer == 0 or step in pinned | good
        stays |= last is not None and newer < last
        stays |= every is not None and step % every == 0
        stays |= last is None and every is None and best is None
        is_known = math.isfinite(losses.get(step, math.nan))
        stays |= best is not None and is_known and better(step) < best.n
        assert (step in decision.kept) == stays
        assert (step in decision.removed) != stays
    assert set(decision.kept) | set(decision.removed) == committed


def test_with_mode_max_the_largest_is_best_and_reasons_are_returned() -> None:
    retention = Retention(keep_last=1, keep_every=4, keep_best=KeepBest(metric="acc", mode="max"))
    metrics = {1: {"acc": 0.9}, 2: {"acc": 0.7}, 3: {"acc": math.inf}, 4: {"loss": 9.0}, 5: {}}
    decision = decide(retention, range(1, 6), metrics=metrics, pinned={3})
    assert decision.kept == {1: ("best acc",), 3: ("pinned",), 4: ("every 4",), 5: ("newest", "last 1")}
    assert decision.removed == (2,)


def test_leftovers_are_removed_up_to_a_commit_unless_pinned() -> None:
    assert stale_leftovers([5, 1, 3, 9], upto=5, pinned={3}) == (1, 5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: SaveSchedule(seconds=-1.0), r"SaveSchedule\.seconds is -1"),
        (lambda: SaveSchedule(signals=signal.SIGTERM), r"SaveSchedule\.signals is .*; give a tuple"),
        (lambda: SaveSchedule(signals=tuple(range(1, 10))), r"has 9 signals; give at most 8"),
        (lambda: Retention(keep_last=0), "keep_last is 0"),
        (lambda: Retention(keep_every=-1), "keep_every is -1"),
        (lambda: Retention(keep_last=True), "keep_last is True"),
        (lambda: Retention(keep_best="loss"), r"keep_best is 'loss'; give a KeepBest"),
        (lambda: KeepBest(metric=""), "give the name"),
        (lambda: KeepBest(metric="loss", n=0), r"KeepBest\.n is 0"),
        (lambda: KeepBest(metric="loss", mode="lowest"), "'min' or 'max'"),
    ],
)
def test_a_retention_or_schedule_out_of_range_is_an_error(wrong: object, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        wrong()  # type: ignore[operator]


def no_signals() -> SignalWatch:
    return SignalWatch(())


def test_multiples_of_steps_are_due_once_and_after_a_resume(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, save_interval=10)
    made: list[int] = []

    def run(steps: range) -> list[int]:
        return [s for s in steps if checkpointer.maybe_save(s, lambda s=s: made.append(s) or {"step": s})]

    assert run(range(26)) == [10, 20]
    assert made == [10, 20]  # nothing is built in vain
    assert checkpointer.load({}, 20) == {"step": 20}
    assert not checkpointer.should_save(20)  # it is there
    assert run(range(21, 41)) == [30, 40]
    assert run(range(45, 80, 5)) == [50, 60, 70]
    assert run(range(87, 120, 16)) == [87, 103, 119]  # a multiple has passed since
    assert not Checkpointer(tmp_path).should_save(100)


def test_rank_0s_clock_decides_for_all_ranks_which_synchronise_about_once_a_second() -> None:
    world = SimulatedWorld(4)

    def train(group: Group) -> list[int]:
        now = [0.0]
        # Every rank's clock runs at a pace of its own; rank 0 takes 0.01 s a step, then 0.1 s.
        trigger = SaveTrigger(SaveSchedule(seconds=30.0), no_signals(), clock=lambda: now[0])
        saved = []
        for step in range(1, 10_001):
            now[0] += (0.01 if step <= 9_000 else 0.1) * (1 + group.rank)
            if trigger.should_save(step, group):
                saved.append(step)
                trigger.saved(step)
        return saved

    results = world.run(train)
    assert results[0] == results[1] == results[2] == results[3]
    times = [step * 0.01 if step <= 9_000 else 90 + (step - 9_000) * 0.1 for step in results[0]]
    late = [b - a - 30 for a, b in zip([0.0, *times], times, strict=False)]
    assert len(times) == 5
    assert all(-1e-6 < seconds < 1.2 for seconds in late[:2] + late[3:])
    assert late[2] < 11  # an exchange was 100 steps away when they became slow
    assert world.messages[0] < 230  # one in a second, for 190 s; 10,000 would be one at each step


def test_a_signal_at_one_rank_is_a_save_at_the_same_step_on_all() -> None:
    def train(group: Group) -> tuple[list[int], list[int | None]]:
        watch = no_signals()
        watch.signals = (signal.SIGUSR1, signal.SIGTERM)
        watch._flags = dict.fromkeys(watch.signals, False)
        now = [0.0]
        trigger = SaveTrigger(SaveSchedule(steps=50), watch, clock=lambda: now[0])
        saved, exits = [], []
        for step in range(1, 101):
            now[0] += 0.25
            if (group.rank, step) in [(2, 20), (1, 70)]:
                watch._note(signal.SIGUSR1 if step == 20 else signal.SIGTERM, None)
            if trigger.should_save(step, group):
                saved.append(step)
                trigger.saved(step)
                exits.append(trigger.exit_signal)
        return saved, exits

    outcomes = SimulatedWorld(3).run(train)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    saved, exits = outcomes[0]
    assert len(saved) == 4
    assert 20 <= saved[0] <= 24 < 50 == saved[1] < 70 <= saved[2] <= 74 < saved[3] == 100
    assert exits == [None, None, signal.SIGTERM, signal.SIGTERM]


def test_ranks_that_ask_differently_raise_the_same_error() -> None:
    def ask(group: Group, *, seconds: float, step: int) -> None:
        SaveTrigger(SaveSchedule(seconds=seconds), no_signals()).should_save(step, group)

    by_step = SimulatedWorld(2).outcomes(lambda group: ask(group, seconds=9.0, step=5 + group.rank))
    by_option = SimulatedWorld(2).outcomes(lambda group: ask(group, seconds=9.0 + group.rank, step=5))
    for outcomes, message in ((by_step, "give the same step"), (by_option, "give the same schedule")):
        assert all(isinstance(o, DeclarationError) and message in str(o) for o in outcomes), outcomes


def test_a_real_signal_saves_then_asks_to_exit_and_handlers_are_put_back(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    try:
        theirs = signal.getsignal(signal.SIGTERM)
        usr1 = signal.getsignal(signal.SIGUSR1)
        schedule = SaveSchedule(signals=(signal.SIGTERM, signal.SIGUSR1))
        with Checkpointer(tmp_path, schedule=schedule) as checkpointer:
            assert not checkpointer.maybe_save(1, lambda: {"step": 1})
            os.kill(os.getpid(), signal.SIGUSR1)
            assert checkpointer.maybe_save(2, lambda: {"step": 2})
            assert not checkpointer.exit_requested
            assert checkpointer.exit_code is None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not checkpointer.should_save(2)  # it is saved
            os.kill(os.getpid(), signal.SIGTERM)
            assert checkpointer.maybe_save(3, lambda: {"step": 3})
            assert checkpointer.exit_requested
            assert checkpointer.exit_code == 143
        assert seen == [signal.SIGTERM]  # who listened before still does
        assert checkpointer.steps() == (2, 3)
        assert signal.getsignal(signal.SIGTERM) is theirs
        assert signal.getsignal(signal.SIGUSR1) == usr1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_step_that_a_signal_asks_for_goes_to_the_root_whatever_root_every_is(tmp_path: Path) -> None:
    schedule = SaveSchedule(steps=1, signals=(signal.SIGUSR1,))
    with Checkpointer(tmp_path, tiers=Tiers(root_every=500), schedule=schedule) as checkpointer:
        assert not checkpointer.maybe_save(119, lambda: {"step": 119})
        assert checkpointer.steps() == ()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert checkpointer.maybe_save(120, lambda: {"step": 120})
        assert not checkpointer.maybe_save(121, lambda: {"step": 121})
        assert checkpointer.steps() == (120,)


def test_a_step_without_a_destination_is_not_saved(tmp_path: Path) -> None:
    tiers = Tiers([MemoryTier(tmp_path / "tier", every=10)], root_every=100)
    with Checkpointer(tmp_path / "root", tiers=tiers, save_interval=3) as checkpointer:
        assert not checkpointer.maybe_save(3, lambda: {"step": 3})  # due, but nobody's
        assert checkpointer.save(10, {"step": 10})
        assert checkpointer.steps() == ()


def test_a_signal_asks_until_a_save_is_tried() -> None:
    with contextlib.closing(SignalWatch((signal.SIGUSR1,))) as watch:
        watch.start()
        trigger = SaveTrigger(SaveSchedule(), watch)
        signal.raise_signal(signal.SIGUSR1)
        group = SingleProcess()
        assert [trigger.should_save(step, group) for step in (1, 2)] == [True, True]  # 1 was skipped
        assert trigger.is_signalled
        trigger.saved(2)
        assert not trigger.is_signalled
        assert not trigger.should_save(3, group)


def test_watches_that_are_closed_in_the_order_they_were_made_leave_the_signal_as_it_was() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda signum, frame: seen.append(signum))
    try:
        first, second = SignalWatch((signal.SIGUSR2,)), SignalWatch((signal.SIGUSR2,))
        first.start()
        second.start()
        first.close()
        signal.raise_signal(signal.SIGUSR2)
        assert second.received() == (1,)
        second.close()
        signal.raise_signal(signal.SIGUSR2)
        assert seen == [signal.SIGUSR2, signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


FORKED = """
import multiprocessing, os, signal, sys
from megackpt import Checkpointer, SaveSchedule

earlier = sys.argv[2]
if earlier == "handler":
    signal.signal(signal.SIGTERM, lambda signum, frame: os._exit(7))
elif earlier == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
signals = (signal.SIGTERM, signal.SIGINT)
checkpointer = Checkpointer(sys.argv[1], schedule=SaveSchedule(steps=10, signals=signals))
ready, begun = multiprocessing.get_context("fork").Pipe(duplex=False)


def work():
    begun.send("ready")
    while True:
        signal.pause()


child = multiprocessing.get_context("fork").Process(target=work)
child.start()
ready.recv()
if earlier == "ignore":
    os.kill(child.pid, signal.SIGTERM)
    assert child.is_alive()
    child.kill()
else:
    child.terminate()
child.join()
print(child.exitcode, flush=True)
assert not checkpointer.maybe_save(1, dict)  # the parent has received nothing
os.kill(os.getpid(), signal.SIGTERM)
assert checkpointer.maybe_save(2, lambda: {"step": 2})
"""


@pytest.mark.parametrize(("earlier", "exit_code"), [("default", -15), ("handler", 7), ("ignore", -9)])
def test_a_forked_process_ends_as_if_nothing_watched_its_signals(
    earlier: str, exit_code: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", FORKED, str(tmp_path / "run"), earlier]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout == f"{exit_code}\n", done.stderr
    # The parent's earlier handler ends it, too, when the signal is noted.
    assert done.returncode == (7 if earlier == "handler" else 0), done.stderr


def test_a_handler_that_came_later_stays() -> None:
    watch = SignalWatch((signal.SIGUSR2,))
    watch.start()
    before = watch._earlier_handlers[signal.SIGUSR2]
    try:
        signal.signal(signal.SIGUSR2, later := lambda signum, frame: None)
        watch.close()
        assert signal.getsignal(signal.SIGUSR2) is later
    finally:
        signal.signal(signal.SIGUSR2, before)  # type: ignore[arg-type]


def test_a_checkpointer_that_cannot_be_constructed_sets_no_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `close` puts handlers back, and nobody could call it: so they are set when all else is there."""

    def fail(*_: object) -> None:
        raise MemoryError

    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(checkpointer_module, "ScheduledSaving", fail)
    with pytest.raises(MemoryError):
        Checkpointer(tmp_path, schedule=SaveSchedule(signals=(signal.SIGUSR1,)))
    assert signal.getsignal(signal.SIGUSR1) is before


class BusySaving(DirectSaving):
    """Saves nothing, and is too busy for some steps; notes the destinations of the others."""

    def __init__(self, *, is_free: Sequence[bool]) -> None:
        self._is_free, self.saved = list(is_free), list[tuple[int, Destinations]]()

    def may_save(self, group: Group, *, is_last: bool) -> bool:
        return self._is_free.pop(0)

    def save(self, step: int, to: Destinations, *_: Any) -> bool:
        self.saved.append((step, to))
        return True


class StubBranch(RunBranch):
    """A run without other steps."""

    def __init__(self) -> None:
        self.to_discard = frozenset()

    def is_decided(self, step: int) -> bool:
        return True

    def origin(self, step: int, group: Group) -> StepOrigin:
        return StepOrigin()

    def saved(self, step: int) -> None:
        pass


def test_a_step_that_is_skipped_leaves_its_destinations_to_the_next_one() -> None:
    tiers = Tiers([MemoryTier("/dev/shm/none", every=10)], root_every=100)
    saving, group = BusySaving(is_free=[False, True]), SingleProcess()
    trigger = SaveTrigger(SaveSchedule(steps=5), no_signals())
    failures = SaveFailures("raise")
    scheduled = ScheduledSaving(saving, DestinationChoice(tiers), trigger, StubBranch(), failures)
    request = save_request({}, options=SaveOptions())
    results = []
    for step in (100, 101, 102):
        destinations = scheduled.destinations(step, None, group)
        results.append(scheduled.save(step, destinations, request, None, group))
    assert results == [False, True, False]  # 102 is for no destination
    assert saving.saved == [(101, Destinations((0,), root=True))]


def test_signals_that_cannot_be_watched_leave_all_handlers_as_they_were(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(DeclarationError, match="signal 9 cannot be handled"):
        Checkpointer(tmp_path, schedule=SaveSchedule(signals=(signal.SIGKILL, signal.SIGUSR1)))
    errors: list[BaseException] = []

    def construct() -> None:
        try:
            Checkpointer(tmp_path, schedule=SaveSchedule(signals=(signal.SIGUSR1,)))
        except DeclarationError as error:
            errors.append(error)

    thread = threading.Thread(target=construct)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_interval": 0}, "save_interval is 0"),
        ({"save_interval": 2.5}, "save_interval is 2.5"),
        (
            {"save_interval": 2, "schedule": SaveSchedule(seconds=9)},
            r"save_interval=2 and schedule=.* are both given.*write SaveSchedule\(steps=2, \.\.\.\)",
        ),
        (
            {"keep_last": 2, "retention": Retention(keep_every=9)},
            r"keep_last=2 and retention=.* are both given.*write Retention\(keep_last=2, \.\.\.\)",
        ),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"on_newer_steps": "remove"}, "on_newer_steps='remove' is not known. Give 'error', 'keep'"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
    ],
)
def test_options_out_of_range_are_errors(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        Checkpointer(tmp_path, **options)  # type: ignore[arg-type]


Done = list[str | list[str]]


@pytest.mark.parametrize("kind", [LocalStore, MemoryStore])
def test_that_a_step_is_no_checkpoint_any_more_is_durable_before_other_files_go(
    tmp_path: Path, kind: type[LocalStore] | type[MemoryStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a loss of power could leave the commit of a step, of which other files are gone.
    root = tmp_path if kind is LocalStore else MemoryStore()
    with Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))})
    done: Done = []
    delete, sync = kind.delete, kind.sync

    def recorded_delete(self: LocalStore, names: Iterable[str]) -> None:
        listed = list(names)
        done.append([name.rpartition("/")[2] for name in listed])
        delete(self, listed)

    def recorded_sync(self: LocalStore) -> None:
        done.append("sync")
        sync(self)

    monkeypatch.setattr(kind, "delete", recorded_delete)
    monkeypatch.setattr(kind, "sync", recorded_sync)
    step_directories(root, objects=None).remove(step_name(1))
    assert done[:2] == [[MANIFEST], "sync"]
    assert len(done[2]) >= 2
    assert Checkpointer(root).scan().incomplete == ()


def test_all_files_of_a_step_are_listed_those_in_directories_too(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001" / "data").mkdir(parents=True)
    for name, nbytes, time_s in (("top", 3, 50.0), ("data/0", 7, 60.0)):
        path = tmp_path / "iter_0000001" / name
        path.write_bytes(b"x" * nbytes)
        os.utime(path, (time_s, time_s))
    (tmp_path / "iter_0000002").mkdir()
    steps = step_directories(tmp_path, objects=None)
    files = steps.files("iter_0000001")
    assert files is not None
    assert sorted(files, key=lambda file: file.name) == [
        StepFile(name="data/0", nbytes=7, modified_s=60.0),
        StepFile(name="top", nbytes=3, modified_s=50.0),
    ]
    assert steps.files("iter_0000002") == []
    assert steps.files("iter_0000003") is None


def test_files_of_a_step_in_a_store_without_directories_have_names_below_it() -> None:
    store = MemoryStore()
    store.write("iter_0000001/data/0", b"1234567")
    store.write("iter_0000002/top", b"123")
    steps = step_directories(store, objects=None)
    files = steps.files("iter_0000001")
    assert files is not None
    assert [(file.name, file.nbytes) for file in files] == [("data/0", 7)]
    assert not steps.files("iter_0000003")
