"""Asynchronous saves hold what the state was when `save` was called, and their failures are not lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    CheckpointError,
    DeclarationError,
    IntegrityError,
    RankFailedError,
    SaveOptions,
    ShardedObject,
    ShardedTensor,
    StorageError,
    WriterFailedError,
    load,
    register_codec,
)
from megackpt.comm import Group, SingleProcess
from megackpt.engine import async_save, writer_process
from megackpt.engine.async_save import AsyncSaver
from megackpt.formats.torch_dist import TorchDistSaveStrategy
from megackpt.storage import MemoryStore
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.effort import is_thorough
from tests.writer_faults import (
    FullDiskStrategy,
    GatedStrategy,
    HungStrategy,
    KilledStrategy,
    LeavingStrategy,
    MistakenStrategy,
    SlowStrategy,
    wait_for,
)

pytestmark = pytest.mark.multiprocess

OPTIONS = SaveOptions(timeout_s=20)
MANY = 200_000  # rows whose copy takes longer than to start one


def part(value: float, rows: int = 1000) -> ShardedTensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return ShardedTensor.from_rank_offsets("w", torch.full((rows, 10), value + rank), (0, rank, ranks))


def saver_of(checkpointer: Checkpointer) -> AsyncSaver:
    found = checkpointer._behind and checkpointer._behind.saver
    assert found is not None
    return found


def save_while_training(root: Path, gate: Path) -> None:
    with Checkpointer(root, keep_last=1, async_save=True) as checkpointer:
        weight, common = part(1.0), {"lr": [0.5]}
        checkpointer.save(1, {"w": weight, "common": common}, sharded_strategy=GatedStrategy(gate))
        assert checkpointer.is_saving
        assert checkpointer.steps() == ()
        weight.data.fill_(-1)  # training goes on, with collectives of its own, while nothing is written yet
        common["lr"][0] = -1
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        (gate / "go").touch()
        loaded = checkpointer.load({"w": part(0.0)})  # the step that is under way
        assert torch.equal(loaded["w"], part(1.0).data)
        assert loaded["common"] == {"lr": [0.5]}
        checkpointer.save(2, {"w": part(2.0), "common": {"lr": 0.25}})
        checkpointer.wait()
        assert not checkpointer.poll()
        dist.barrier()
        assert checkpointer.steps() == (2,)  # keep_last is followed after the commit


def test_a_step_holds_the_state_at_the_call_while_training_goes_on(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_while_training, 2, tmp_path / "root", _made(tmp_path / "gate"))


def survive_failures(root: Path, gate: Path) -> None:
    checkpointer = Checkpointer(root, async_save=True, save_options=OPTIONS)
    checkpointer.save(1, {"w": part(1.0)})
    for step, look in ((2, checkpointer.wait), (3, lambda: checkpointer.save(9, {"w": part(9.0)}))):
        checkpointer.save(step, {"w": part(2.0)}, sharded_strategy=FullDiskStrategy())
        with pytest.raises(StorageError, match=r"Rank 1 failed.*the disk of rank 1 is full"):
            look()
    checkpointer.save(4, {"w": part(4.0)})

    pid = saver_of(checkpointer).writer_pid
    checkpointer.save(5, {"w": part(5.0)}, sharded_strategy=KilledStrategy())
    with pytest.raises(RankFailedError, match=r"writer process of rank 1 .* was killed by SIGKILL") as found:
        checkpointer.wait()
    assert found.value.rank == 1
    assert "step 5" in str(found.value)
    checkpointer.save(6, {"w": part(6.0)})
    assert (saver_of(checkpointer).writer_pid == pid) == (dist.get_rank() != 1)

    checkpointer.save(7, {"w": part(7.0)}, sharded_strategy=GatedStrategy(gate))
    wait_for(lambda: all((gate / f"begun.{rank}").exists() for rank in range(dist.get_world_size())))
    dist.barrier()
    if dist.get_rank() == 0:  # the store that writers meet in is hosted by rank 0
        store = saver_of(checkpointer).store
        assert store is not None
        store.close()
        (gate / "go").touch()
    with pytest.raises(RankFailedError, match=r"The store .* is gone"):
        checkpointer.wait()
    checkpointer.save(8, {"w": part(8.0)})
    checkpointer.wait()
    checkpointer.save(10, {"w": part(10.0)}, sharded_strategy=FullDiskStrategy())
    with pytest.raises(StorageError, match="rank 1"):
        checkpointer.close()
    dist.barrier()
    assert checkpointer.steps() == (1, 4, 6, 8)
    loaded = checkpointer.load({"w": part(0.0)})
    assert torch.equal(loaded["w"], part(8.0).data)


def train_on_without_a_writer(root: Path) -> None:
    """The process that writes is killed, which with on_error="warn" costs one save and nothing else."""
    with Checkpointer(root, async_save=True, on_error="warn", save_options=OPTIONS) as checkpointer:
        checkpointer.save(1, {"w": part(1.0)})
        checkpointer.save(2, {"w": part(2.0)}, sharded_strategy=KilledStrategy())
        assert checkpointer.save(3, {"w": part(3.0)})
    assert checkpointer.failed_saves == 1
    assert checkpointer.steps() == (1, 3)


def end_by_a_mistake(root: Path) -> list[str]:
    """A strategy raises what is none of ours, where training outlives what it can."""
    said = []
    for behind in (False, True):
        checkpointer = Checkpointer(root, async_save=behind, on_error="warn", save_options=OPTIONS)

        def save(checkpointer: Checkpointer = checkpointer) -> None:
            checkpointer.save(1, {"w": part(1.0)}, sharded_strategy=MistakenStrategy(1))
            checkpointer.wait()

        with pytest.raises(CheckpointError) as found:
            save()
        assert checkpointer.failed_saves == 0
        said.append(f"{type(found.value).__name__} of {found.value.rank}: {found.value}")
        checkpointer.save(2, {"w": part(2.0)})
        checkpointer.close()
    return said


def test_training_does_not_outlive_a_mistake_in_a_strategy_in_whichever_process_it_is_met(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    said = rank_pool.run(end_by_a_mistake, 2, tmp_path)
    text = "Rank 1 failed while writing its chunks: OwnMistakeError: something of one's own"
    assert said == [[f"RankFailedError of 1: {text}"] * 2] * 2


def test_a_mistake_in_the_strategy_of_a_rank_alone_is_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with alone(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, ones(), sharded_strategy=MistakenStrategy(0))
        with pytest.raises(RankFailedError, match=r"Rank 0 failed while saving step 1: OwnMistake") as found:
            checkpointer.wait()
        assert not isinstance(found.value, WriterFailedError)
        assert "in write_chunks" in capfd.readouterr().err  # where it comes from
        checkpointer.save(2, ones(), sharded_strategy=LeavingStrategy())
        checkpointer.wait()  # does not hang, and is outlived, as a writer that was killed is
        assert checkpointer.failed_saves == 1


def outlast_hung_writers(root: Path) -> str:
    checkpointer = Checkpointer(root, async_save=True, save_options=SaveOptions(timeout_s=1))
    checkpointer.save(1, {"w": part(1.0)}, sharded_strategy=HungStrategy())
    with pytest.raises(WriterFailedError, match=r"rank 1|rank\(s\) 1"):
        checkpointer.wait()
    saver_of(checkpointer)._session.running().wait_ready()
    dist.barrier()
    os.kill(saver_of(checkpointer).writer_pid, signal.SIGSTOP)
    checkpointer.save(1, {"w": part(1.0)})
    with pytest.raises(WriterFailedError) as found:  # all hang, so none waits for another and gives it up
        checkpointer.wait()
    dist.barrier()
    checkpointer.close()
    patient = Checkpointer(root, async_save=True, save_options=OPTIONS)
    patient.save(2, {"w": part(2.0)})
    patient.close()
    assert patient.steps() == (2,)
    return str(found.value)


def test_writers_that_hang_are_given_up_and_replaced(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(outlast_hung_writers, 2, tmp_path)
    assert first == second
    assert "made no progress for 1 s and was killed while saving step 1" in first


def test_training_outlives_a_writer_that_is_killed(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_on_without_a_writer, 2, tmp_path)


def test_a_failure_of_a_writer_is_raised_on_all_ranks_and_the_next_save_works(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(survive_failures, 2, tmp_path / "root", _made(tmp_path / "gate"))


def pass_in_waves(root: Path) -> None:
    options = AsyncOptions(staging_bytes=1 << 16)
    rows = 30_000  # 18 times the memory
    with Checkpointer(root, async_save=True, async_options=options, save_options=OPTIONS) as checkpointer:
        for step in (1, 2):
            odd = torch.arange(7) + dist.get_rank()
            small = ShardedTensor.from_rank_offsets("small", odd, (0, dist.get_rank(), 2))
            state = {"w": part(float(step), rows), "small": small, "common": {"n": step}}
            checkpointer.save(step, state)
            state["w"].data.zero_()
        assert saver_of(checkpointer).staging_nbytes == 1 << 16
        loaded = checkpointer.load({"w": part(0.0, rows)})
        assert torch.equal(loaded["w"], part(2.0, rows).data)
        one_file = TorchDistSaveStrategy(thread_count=1)
        checkpointer.save(3, {"w": part(3.0, rows)}, sharded_strategy=one_file)
        loaded = checkpointer.load({"w": part(0.0, rows)})
        assert torch.equal(loaded["w"], part(3.0, rows).data)
        with pytest.raises(DeclarationError, match=r"in no fixed order.*Raise staging_bytes"):
            checkpointer.save(4, {"w": part(4.0, rows)}, sharded_strategy="zarr")
        checkpointer.save(5, {"w": part(5.0)}, sharded_strategy="zarr")
    assert checkpointer.steps() == (1, 2, 3, 5)


def test_a_state_larger_than_the_staging_memory_passes_through_it_in_waves(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(pass_in_waves, 2, tmp_path)


def save_when_busy(root: Path, gates: Path) -> list[bool]:
    said = []
    rank = dist.get_rank()
    for policy in ("skip", "queue"):
        gate = gates / policy
        options = AsyncOptions(when_busy=policy, stage_in_background=True)  # type: ignore[arg-type]
        with Checkpointer(root / policy, async_save=True, async_options=options) as checkpointer:
            weight = part(1.0, MANY)
            strategy = GatedStrategy(gate)
            said.append(checkpointer.save(1, {"w": weight}, sharded_strategy=strategy))
            checkpointer.wait_staged()
            weight.data.fill_(-1)
            dist.barrier()
            if policy == "queue":  # there is no room for a second one before the first is written
                (gate / "go").touch()
            weight = part(2.0, MANY)
            said.append(checkpointer.save(2, {"w": weight, "o": ShardedObject("o", [rank], (2,), (rank,))}))
            checkpointer.wait_staged()
            weight.data.fill_(-1)
            (gate / "go").touch()
            checkpointer.wait()
            said.append(checkpointer.save(3, {"w": part(3.0, MANY)}))
        dist.barrier()
        steps = checkpointer.steps()
        assert steps == ((1, 3) if policy == "skip" else (1, 2, 3))
        for step in steps:
            loaded = load({"w": part(0.0, MANY)}, root / policy / f"iter_{step:07d}")
            assert torch.equal(loaded["w"], part(float(step), MANY).data)
    return said


def test_a_second_save_is_skipped_or_queued(rank_pool: RankPool, tmp_path: Path) -> None:
    for policy in ("skip", "queue"):
        _made(tmp_path / policy)
    said = rank_pool.run(save_when_busy, 2, tmp_path / "root", tmp_path)
    assert said == [[True, False, True, True, True, True]] * 2


def save_in(root: Path, backends: list[Any]) -> None:
    with Checkpointer(root, async_save=True, save_options=OPTIONS) as checkpointer:
        keys = []
        for step, backend in enumerate(backends):
            checkpointer.save(
                step,
                {"w": part(float(step)), "n": torch.arange(3)},
                sharded_strategy=backend,
                content_metadata=step,
            )
            checkpointer.wait()
            store = saver_of(checkpointer).store
            dist.barrier()
            keys.append(store.key_count() if store else 0)
        assert keys[1:] == keys[:-1]  # the store that writers meet in does not grow
        for step in range(len(backends)):
            loaded = checkpointer.load({"w": part(0.0)}, step=step)
            assert torch.equal(loaded["w"], part(float(step)).data)
            assert torch.equal(loaded["n"], torch.arange(3))
            assert checkpointer.content_metadata(step) == step


def test_every_format_is_saved_asynchronously(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_in, 2, tmp_path, ["megackpt", "torch_dist", ("zarr", 1), ("zarr", 3)])


def die_while_saving(root: Path, gate: Path) -> str:
    rank = dist.get_rank()
    checkpointer = Checkpointer(root, async_save=True, save_options=SaveOptions(timeout_s=2))
    writer = saver_of(checkpointer).writer_pid
    (gate / f"writer.{rank}").write_text(str(writer))
    checkpointer.save(1, {"w": part(1.0)}, sharded_strategy=GatedStrategy(gate))
    wait_for((gate / f"begun.{rank}").exists)
    for process in ("self", writer):  # the shared memory has no name that could stay behind
        maps = Path(f"/proc/{process}/maps").read_text()
        assert "/dev/shm" not in maps
        assert "memfd:megackpt-staging" in maps
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    other = int((gate / "writer.1").read_text())
    wait_for(lambda: not _is_alive(other))
    (gate / "go").touch()
    with pytest.raises(RankFailedError) as found:
        checkpointer.close()
    return str(found.value)


def test_nothing_outlives_a_training_process_that_is_killed(rank_pool: RankPool, tmp_path: Path) -> None:
    gate = _made(tmp_path / "gate")
    survivor, victim = rank_pool.outcomes(die_while_saving, 2, tmp_path / "root", gate)
    assert isinstance(victim.error, EOFError)
    assert survivor.error is None, survivor.trace
    assert "writer process of rank(s) 1 within 2 s" in survivor.value
    assert not (tmp_path / "root" / "iter_0000001" / "metadata.json").exists()


def descriptors_after_many(root: Path) -> list[int]:
    def one(number: int) -> int:
        with Checkpointer(root / str(number), async_save=True) as checkpointer:
            checkpointer.save(1, {"w": part(1.0)})
        return len(os.listdir("/proc/self/fd"))

    return [one(number) for number in range(3)]


class Damaged(Checkpointer):
    _writer_hook = "tests.writer_faults:damaging_step_2"


@dataclass
class Schedule:
    """A class that writer processes do not know."""

    warmup: int


def verify_saves(root: Path) -> str:
    register_codec(Schedule, "tests.Schedule")
    torch.serialization.add_safe_globals([Schedule])
    rank = dist.get_rank()
    objects = {"o": ShardedObject("o", Schedule(rank), (2,), (rank,)), "common": Schedule(3)}
    options: dict[str, Any] = {"async_save": True, "verify_after_save": True, "keep_last": 1}
    with Damaged(root, save_options=OPTIONS, **options) as checkpointer:
        checkpointer.save(1, {"w": part(1.0), **objects})
        checkpointer.save(2, {"w": part(2.0)})
        with pytest.raises(IntegrityError) as found:
            checkpointer.wait()
        dist.barrier()
        assert checkpointer.steps() == (1,)
        for step, backend in (
            (3, "torch_dist"),
            (4, "zarr"),
        ):
            checkpointer.save(step, {"w": part(3.0), **objects}, sharded_strategy=backend)
            checkpointer.wait()
            dist.barrier()
            assert checkpointer.steps() == (step,)
    return str(found.value)


def test_writers_verify_what_they_have_committed_each_its_share(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(verify_saves, 2, tmp_path / "root")
    assert first == second
    assert first.startswith("Rank 0 failed while verifying the step: ")
    assert "iter_0000002 is damaged right after it was saved" in first
    assert "-00001.safetensors, 'w' [1000:2000, 0:10]" in first
    assert {file.name for file in tmp_path.glob("share-*")} == {"share-0-of-2", "share-1-of-2"}


def test_a_closed_checkpointer_leaves_no_connections(rank_pool: RankPool, tmp_path: Path) -> None:
    for _, second, third in rank_pool.run(descriptors_after_many, 2, tmp_path):
        assert third <= second


def test_any_group_will_do(tmp_path: Path) -> None:
    def run(group: Group) -> None:
        data = torch.full((2,), group.rank + 1.0)
        state = {"w": ShardedTensor.from_rank_offsets("w", data, (0, group.rank, group.size))}
        with Checkpointer(tmp_path, async_save=True, group=group) as checkpointer:
            checkpointer.warm_up(state)
            assert checkpointer.steps() == ()
            checkpointer.save(1, state)

    SimulatedWorld(2).run(run)
    whole = load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, tmp_path / "iter_0000001")
    assert whole["w"].tolist() == [1, 1, 2, 2]


class Refused(Checkpointer):
    _writer_hook = "tests.writer_faults:refusing"


def test_tests_can_stand_between_a_writer_and_its_store(tmp_path: Path) -> None:
    checkpointer = Refused(tmp_path, async_save=True, group=SingleProcess())
    checkpointer.save(1, {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))})
    with pytest.raises(StorageError, match="iter_0000001 is refused by the hook"):
        checkpointer.close()


def alone(root: Path, **options: Any) -> Checkpointer:
    return Checkpointer(root, async_save=True, group=SingleProcess(), **options)


def ones() -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}


def fail_in_the_block(root: Path) -> None:
    with Refused(root, async_save=True, group=SingleProcess()) as checkpointer:
        checkpointer.save(1, ones())
        raise KeyError("the user's own")


def test_the_error_that_ends_a_block_is_not_hidden_by_that_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="the user's own"):
        fail_in_the_block(tmp_path)
    assert "iter_0000001 is refused by the hook" in caplog.text


def test_ctrl_c_while_a_state_is_copied_fails_that_save_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with alone(tmp_path) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(async_save, "fill", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, ones())
        with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
            checkpointer.wait()  # and does not hang
        checkpointer.save(2, ones())
    assert checkpointer.steps() == (2,)


def test_training_outlives_a_writer_that_is_killed_if_it_is_to(tmp_path: Path) -> None:
    with alone(tmp_path, on_error="warn") as checkpointer:
        checkpointer.warm_up(ones())
        writer = saver_of(checkpointer).writer_pid
        os.kill(writer, signal.SIGSTOP)
        assert checkpointer.save(1, ones())
        os.kill(writer, signal.SIGKILL)
        checkpointer.wait()
        assert checkpointer.failed_saves == 1
        assert checkpointer.save(2, ones())
    assert checkpointer.steps() == (2,)


def test_a_writer_that_is_alone_and_makes_no_progress_is_given_up_also_if_it_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_GRACE_S", 0.0)
    monkeypatch.setattr(writer_process, "_END_S", 1.0)
    with alone(tmp_path, timeout_s=1.5) as checkpointer:
        checkpointer.warm_up(ones())
        saver = saver_of(checkpointer)
        process, pid = saver._session.writer._process, saver.writer_pid
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(process, "kill", lambda: None)  # as if it waited for a disk, in the kernel
        checkpointer.save(1, ones())
        said = rf"of rank 0 \(process {pid}\) made no progress for 1.5 s and was killed while saving step 1"
        with pytest.raises(WriterFailedError, match=said) as found:
            checkpointer.wait()
        assert found.value.rank == 0
        assert _is_alive(pid)
        checkpointer.save(2, ones())
    assert checkpointer.steps() == (2,)
    monkeypatch.undo()
    process.kill()
    process.wait()


SLOW = {  # until silence of 3 s would have been noticed
    "taking rows": SlowStrategy(1.1, takes_rows=True),
    "writing": SlowStrategy(1.1, takes_rows=False),
    "not to blame": None,
}


def test_a_writer_that_is_slow_and_makes_progress_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = async_save.fill

    def slow_fill(*arguments: Any) -> None:
        time.sleep(4.4)
        fill(*arguments)

    monkeypatch.setattr(writer_process, "_GRACE_S", 0.0)
    state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.ones(4)) for n in range(4)}
    cases = list(SLOW) if is_thorough() else [random.choice(list(SLOW))]
    with alone(tmp_path, timeout_s=2.5) as checkpointer:
        for step, case in enumerate(cases):
            print(case)
            monkeypatch.setattr(async_save, "fill", fill if SLOW[case] else slow_fill)
            checkpointer.save(step, state, sharded_strategy=SLOW[case])
    assert checkpointer.steps() == tuple(range(len(cases)))


def test_the_last_save_of_a_run_is_not_skipped(tmp_path: Path) -> None:
    options = AsyncOptions(when_busy="skip")
    with alone(tmp_path, async_options=options, save_on_signal=(signal.SIGTERM,)) as checkpointer:
        checkpointer.warm_up(ones())
        writer = saver_of(checkpointer).writer_pid
        os.kill(writer, signal.SIGSTOP)
        assert checkpointer.save(1, ones())
        assert not checkpointer.save(2, ones())
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.2, os.kill, (writer, signal.SIGCONT)).start()
        assert checkpointer.maybe_save(3, ones)
        assert checkpointer.exit_requested
    assert checkpointer.steps() == (1, 3)


def test_a_store_that_another_process_cannot_be_given_is_refused() -> None:
    with pytest.raises(DeclarationError, match=r"cannot be given a MemoryStore. Give a path or an URL"):
        Checkpointer(MemoryStore(), async_save=True)


SCRIPT = """
import sys, torch
from megackpt import Checkpointer, DeclarationError, ShardedTensor
from megackpt.formats.native import NativeSaveStrategy
print("the script runs")
class Mine(NativeSaveStrategy): pass
checkpointer = Checkpointer(sys.argv[1], async_save=True)
state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}
try:
    checkpointer.save(1, state, sharded_strategy=Mine())
except DeclarationError as error:
    print(error)
checkpointer.save(2, state)
"""


def test_a_script_that_ends_waits_for_its_save_and_is_run_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "root")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "the script runs"
    assert second.startswith("Mine is defined in the script itself")
    assert Checkpointer(tmp_path / "root").latest() == 2


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
