"""Asynchronous saves that fail: the error is raised where it is due, and the next save works."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    Checkpointer,
    CheckpointError,
    MemoryTier,
    RankFailedError,
    SaveOptions,
    ShardedTensor,
    StorageError,
)
from megackpt.comm import SingleProcess
from megackpt.engine.background import child_process, session
from megackpt.engine.background import process as writer_process
from megackpt.engine.background import saver as async_save
from megackpt.errors import WriterFailedError
from megackpt.testing.ranks import RankPool
from tests.support.effort import tries_all, with_all
from tests.support.writers import (
    OPTIONS,
    FullDiskStrategy,
    GatedStrategy,
    KilledStrategy,
    LeavingStrategy,
    MistakenStrategy,
    SlowStrategy,
    is_alive,
    made,
    ones,
    part,
    saver_of,
    single_process_checkpointer,
    stop_process,
    wait_for,
    wait_for_writers,
)


class WithRejectingStore(Checkpointer):
    _writer_hook = "tests.support.writers:rejecting"


SLOW = {  # for longer than the time-out of 4 s
    "taking rows": SlowStrategy(1.1, takes_rows=True),
    "writing": SlowStrategy(1.1, takes_rows=False),
    "not to blame": None,
}


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
    with pytest.raises(RankFailedError, match=r"writer process of rank 1 .* was killed by SIGKILL") as raised:
        checkpointer.wait()
    assert raised.value.rank == 1
    assert "step 5" in str(raised.value)
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
    """A strategy raises a foreign error, and training tolerates what it can."""
    message = []
    for behind in (False, True):
        checkpointer = Checkpointer(root, async_save=behind, on_error="warn", save_options=OPTIONS)

        def save(checkpointer: Checkpointer = checkpointer) -> None:
            checkpointer.save(1, {"w": part(1.0)}, sharded_strategy=MistakenStrategy(1))
            checkpointer.wait()

        with pytest.raises(CheckpointError) as raised:
            save()
        assert checkpointer.failed_saves == 0
        message.append(f"{type(raised.value).__name__} of {raised.value.rank}: {raised.value}")
        checkpointer.save(2, {"w": part(2.0)})
        checkpointer.close()
    return message


def test_training_does_not_tolerate_a_mistake_in_a_strategy_in_whichever_process_it_is_met(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    message = rank_pool.run(end_by_a_mistake, 2, tmp_path)
    text = "Rank 1 failed while writing its chunks: OwnMistakeError: something of one's own"
    assert message == [[f"RankFailedError of 1: {text}"] * 2] * 2


def test_a_mistake_in_the_strategy_of_a_rank_alone_is_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session._end_idle()  # a process that an earlier test has left writes where the output of that test went
    with single_process_checkpointer(tmp_path, on_error="warn") as checkpointer:
        checkpointer.save(1, ones(), sharded_strategy=MistakenStrategy(0))
        with pytest.raises(RankFailedError, match=r"Rank 0 failed while saving step 1: OwnMistake") as raised:
            checkpointer.wait()
        assert not isinstance(raised.value, WriterFailedError)
        assert "in write_chunks" in capfd.readouterr().err  # where it comes from
        checkpointer.save(2, ones(), sharded_strategy=LeavingStrategy())
        checkpointer.wait()  # does not hang, and the error is tolerated, as that of a writer that was killed
        assert checkpointer.failed_saves == 1


def test_training_survives_a_writer_that_is_killed(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(train_on_without_a_writer, 2, tmp_path)


def test_a_failure_of_a_writer_is_raised_on_all_ranks_and_the_next_save_works(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(survive_failures, 2, tmp_path / "root", made(tmp_path / "gate"))


def die_while_saving(root: Path, gate: Path) -> str:
    rank = dist.get_rank()
    checkpointer = Checkpointer(root, async_save=True, save_options=SaveOptions(timeout_s=5))
    wait_for_writers(checkpointer)
    dist.barrier()
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
    wait_for(lambda: not is_alive(other))
    (gate / "go").touch()
    with pytest.raises(RankFailedError) as raised:
        checkpointer.close()
    return str(raised.value)


def test_nothing_survives_a_training_process_that_is_killed(rank_pool: RankPool, tmp_path: Path) -> None:
    gate = made(tmp_path / "gate")
    survivor, victim = rank_pool.outcomes(die_while_saving, 2, tmp_path / "root", gate)
    assert isinstance(victim.error, EOFError)
    assert survivor.error is None, survivor.trace
    assert "writer process of rank(s) 1 within 5 s" in survivor.value
    assert not (tmp_path / "root" / "iter_0000001" / "metadata.json").exists()


def fail_in_the_block(root: Path) -> None:
    with WithRejectingStore(root, async_save=True, group=SingleProcess()) as checkpointer:
        checkpointer.save(1, ones())
        raise KeyError("the user's own")


def test_the_error_that_ends_a_block_is_not_hidden_by_that_of_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError, match="the user's own"):
        fail_in_the_block(tmp_path)
    assert "iter_0000001 is rejected by the hook" in caplog.text


def test_ctrl_c_while_a_state_is_copied_fails_that_save_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with single_process_checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(async_save, "copy_rows", interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, ones())
        with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
            checkpointer.wait()  # and does not hang
        checkpointer.save(2, ones())
    assert checkpointer.steps() == (2,)


def test_a_checkpointer_that_is_dropped_during_a_save_commits_it_and_ends_its_writer(tmp_path: Path) -> None:
    checkpointer = single_process_checkpointer(tmp_path / "root", tiers=[MemoryTier(tmp_path / "tier")])
    checkpointer.save(1, ones())
    writer = saver_of(checkpointer).writer_pid
    del checkpointer
    gc.collect()
    wait_for(lambda: not is_alive(writer))
    assert Checkpointer(tmp_path / "root").steps() == (1,)


def test_a_writer_for_which_there_is_no_memory_still_knows_for_which_rank_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with single_process_checkpointer(tmp_path) as checkpointer:
        checkpointer.warm_up(ones())
        session = saver_of(checkpointer)._session
        os.kill(saver_of(checkpointer).writer_pid, signal.SIGKILL)
        wait_for(lambda: session.writer.is_lost)
        session.joined = (1, 2)
        with monkeypatch.context() as patched:
            patched.setattr("megackpt.engine.background.staging_memory._available_bytes", lambda: 0)
            with pytest.raises(StorageError, match="cannot be allocated"):
                session.running()
        assert session.running()._rank == 1


def test_a_writer_that_is_alone_and_makes_no_progress_is_given_up_also_if_it_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_process, "_GRACE_S", 0.0)
    for module in (child_process, writer_process):
        monkeypatch.setattr(module, "END_S", 1.0)
    with single_process_checkpointer(tmp_path, timeout_s=3) as checkpointer:
        checkpointer.warm_up(ones())
        saver = saver_of(checkpointer)
        process, pid = saver._session.writer._process._process, saver.writer_pid
        stop_process(pid)
        monkeypatch.setattr(process, "kill", lambda: None)  # as if it waited for a disk, in the kernel
        checkpointer.save(1, ones())
        message = rf"of rank 0 \(process {pid}\) made no progress for 3 s and was killed while saving step 1"
        with pytest.raises(WriterFailedError, match=message) as raised:
            checkpointer.wait()
        assert raised.value.rank == 0
        assert is_alive(pid)
        checkpointer.save(2, ones())
    assert checkpointer.steps() == (2,)
    monkeypatch.undo()
    process.kill()
    process.wait()


def test_a_writer_that_is_slow_and_makes_progress_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = async_save.copy_rows

    def slow_fill(*arguments: Any) -> None:
        time.sleep(4.4)
        fill(*arguments)

    monkeypatch.setattr(writer_process, "_GRACE_S", 0.0)
    state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", torch.ones(4)) for n in range(4)}
    cases = list(SLOW) if tries_all() else [random.Random(0).choice(list(SLOW))]
    with single_process_checkpointer(tmp_path, timeout_s=4) as checkpointer:
        for step, case in enumerate(cases):
            print(case)
            monkeypatch.setattr(async_save, "copy_rows", fill if SLOW[case] else slow_fill)
            checkpointer.save(step, state, sharded_strategy=SLOW[case])
    assert checkpointer.steps() == tuple(range(len(cases)))


def listening(port: int) -> set[str]:
    """Return the addresses on which a process of this host listens at a port, as the system writes them."""
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        if (table := Path(f"/proc/net/{kind}")).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def look_where_the_store_listens(root: Path) -> set[str]:
    with Checkpointer(root, async_save=True, save_options=OPTIONS) as checkpointer:
        checkpointer.save(1, {"w": part(1.0)})
        store = saver_of(checkpointer).store
        assert store is not None
        addresses = listening(store.address.port)
        dist.barrier()
    return addresses


@with_all("nothing else depends on the address")
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system's table is read")
def test_the_store_of_a_job_on_one_host_listens_on_the_loopback_address_alone(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    loopback = ({"0100007F"}, {"00000000000000000000000001000000"})
    assert all(address in loopback for address in rank_pool.run(look_where_the_store_listens, 2, tmp_path))
