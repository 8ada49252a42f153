"""Asynchronous saves store the state at the call of `save`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megackpt import (
    AsyncOptions,
    Checkpointer,
    DeclarationError,
    IntegrityError,
    SaveSchedule,
    ShardedObject,
    ShardedTensor,
    StorageError,
    load,
    register_codec,
)
from megackpt.comm import Group
from megackpt.engine.background import staging_memory
from megackpt.engine.data.device_copies import ByteArray
from megackpt.engine.saving import local_state
from megackpt.formats.torch_dist import TorchDistSaveStrategy
from megackpt.storage import LocalStore, MemoryStore
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.support.states import OnDevice, replica
from tests.support.writers import (
    OPTIONS,
    GatedStrategy,
    KeepsNothing,
    NamedStore,
    made,
    ones,
    part,
    saver_of,
    single_process_checkpointer,
    stop_process,
)

MANY = 200_000  # rows whose copy takes longer than to start one


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


def test_a_step_has_the_state_at_the_call_while_training_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_while_training, 2, tmp_path / "root", made(tmp_path / "gate"))


def pass_in_waves(root: Path) -> None:
    options = AsyncOptions(staging_bytes=1 << 16)
    rows = 30_000  # 18 times the memory
    with Checkpointer(root, async_save=options, save_options=OPTIONS) as checkpointer:
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
    message = []
    rank = dist.get_rank()
    for policy in ("skip", "queue"):
        gate = gates / policy
        options = AsyncOptions(when_busy=policy, stage_in_background=True)  # type: ignore[arg-type]
        with Checkpointer(root / policy, async_save=options) as checkpointer:
            weight = part(1.0, MANY)
            strategy = GatedStrategy(gate)
            message.append(checkpointer.save(1, {"w": weight}, sharded_strategy=strategy))
            checkpointer.wait_staged()
            weight.data.fill_(-1)
            dist.barrier()
            if policy == "queue":  # there is no room for a second one before the first is written
                (gate / "go").touch()
            weight = part(2.0, MANY)
            message.append(
                checkpointer.save(2, {"w": weight, "o": ShardedObject("o", [rank], (2,), (rank,))})
            )
            checkpointer.wait_staged()
            weight.data.fill_(-1)
            (gate / "go").touch()
            checkpointer.wait()
            message.append(checkpointer.save(3, {"w": part(3.0, MANY)}))
        dist.barrier()
        steps = checkpointer.steps()
        assert steps == ((1, 3) if policy == "skip" else (1, 2, 3))
        for step in steps:
            loaded = load({"w": part(0.0, MANY)}, root / policy / f"iter_{step:07d}")
            assert torch.equal(loaded["w"], part(float(step), MANY).data)
    return message


def test_a_second_save_is_skipped_or_queued(rank_pool: RankPool, tmp_path: Path) -> None:
    for policy in ("skip", "queue"):
        made(tmp_path / policy)
    message = rank_pool.run(save_when_busy, 2, tmp_path / "root", tmp_path)
    assert message == [[True, False, True, True, True, True]] * 2


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
    rank_pool.run(save_in, 2, tmp_path, ["megackpt", "torch_dist", "zarr"])


class Damaged(Checkpointer):
    _writer_hook = "tests.support.writers:damaging_step_2"


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
        with pytest.raises(IntegrityError) as raised:
            checkpointer.wait()
        dist.barrier()
        assert checkpointer.steps() == (1,)
        for step, backend in ((3, "torch_dist"), (4, "zarr")):
            checkpointer.save(step, {"w": part(3.0), **objects}, sharded_strategy=backend)
            checkpointer.wait()
            dist.barrier()
            assert checkpointer.steps() == (step,)
    return str(raised.value)


def test_writers_verify_what_they_have_committed_each_its_share(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(verify_saves, 2, tmp_path / "root")
    assert first == second
    assert first.startswith("Rank 0 failed while verifying the step: ")
    assert "iter_0000002 is damaged right after it was saved" in first
    assert "-00001.safetensors, 'w' [1000:2000, 0:10]" in first
    assert {file.name for file in tmp_path.glob("share-*")} == {"share-0-of-2", "share-1-of-2"}


def descriptors_after_many(root: Path) -> list[int]:
    counts = []
    for number in range(3):
        with Checkpointer(root / str(number), async_save=True) as checkpointer:
            checkpointer.save(1, {"w": part(1.0)})
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_a_closed_checkpointer_leaves_no_connections(rank_pool: RankPool, tmp_path: Path) -> None:
    for _, second, third in rank_pool.run(descriptors_after_many, 2, tmp_path):
        assert third <= second


def test_any_group_can_save_asynchronously(tmp_path: Path) -> None:
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


def test_the_last_save_of_a_run_is_not_skipped(tmp_path: Path) -> None:
    options = AsyncOptions(when_busy="skip")
    schedule = SaveSchedule(signals=(signal.SIGTERM,))
    with single_process_checkpointer(tmp_path, async_save=options, schedule=schedule) as checkpointer:
        checkpointer.warm_up(ones())
        writer = saver_of(checkpointer).writer_pid
        stop_process(writer)
        assert checkpointer.save(1, ones())
        assert not checkpointer.save(2, ones())
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.2, os.kill, (writer, signal.SIGCONT)).start()
        assert checkpointer.maybe_save(3, ones)
        assert checkpointer.exit_requested
    assert checkpointer.steps() == (1, 3)


def test_a_store_that_cannot_be_sent_to_another_process_is_an_error() -> None:
    with pytest.raises(DeclarationError, match=r"MemoryStore cannot be sent to the process .*pickle"):
        Checkpointer(MemoryStore(), async_save=True)

    class Local(LocalStore):
        pass

    with pytest.raises(DeclarationError, match=r"Local is defined in the script itself, or in a function"):
        Checkpointer(Local("here"), async_save=True)


@pytest.mark.parametrize("kind", ["named", "LocalStore"])
def test_a_store_of_a_user_is_saved_to_asynchronously(tmp_path: Path, kind: str) -> None:
    store = NamedStore(tmp_path, "mine") if kind == "named" else LocalStore(tmp_path)
    with single_process_checkpointer(store, keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, ones(), metrics={"loss": 1.0})
        loaded = checkpointer.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))})
    assert torch.equal(loaded["w"], torch.ones(4))
    assert checkpointer.steps() == Checkpointer(tmp_path).steps() == (2, 3)


def test_a_store_whose_copy_writes_elsewhere_is_an_error(tmp_path: Path) -> None:
    checkpointer = single_process_checkpointer(KeepsNothing(tmp_path / "here"))
    checkpointer.save(1, ones())
    with pytest.raises(StorageError, match=r"committed step 1 with its copy of this store, but this process"):
        checkpointer.close()


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert first == "the script runs"
    assert second.startswith("Mine is defined in the script itself")
    assert Checkpointer(tmp_path / "root").latest() == 2


def test_a_writer_follows_staging_memory_that_is_replaced_again_and_again(tmp_path: Path) -> None:
    with single_process_checkpointer(tmp_path) as run:
        run.save(1, ones())
        run.wait()
        writer = saver_of(run)._session.writer
        for step in range(2, 400):  # also while it looks at the sizes before
            writer.resize(step % 7 << 16)
        run.save(2, ones())
        run.wait()
        assert saver_of(run)._session.writer is writer
        assert run.steps() == (1, 2)


def save_what_another_rank_has_changed(root: Path) -> None:
    def replicas(value: float, keys: str) -> dict[str, ShardedTensor]:
        rank = dist.get_rank()
        return {key: replica(value + ord(key), 50, 7, key=key, rank=rank) for key in keys}

    with Checkpointer(root, async_save=True, save_options=OPTIONS) as checkpointer:
        for step, keys_of_1 in enumerate(("abcd", "ad", "abcd", "c", "ad"), 1):
            # Rank 0 declares the same each time; which parts it writes depends on rank 1.
            keys = "abcd" if dist.get_rank() == 0 else keys_of_1
            checkpointer.save(step, replicas(float(step), keys))
            loaded = checkpointer.load(replicas(0.0, keys))
            for key, expected in replicas(float(step), keys).items():
                assert expected.data is not None
                assert torch.equal(loaded[key], expected.data), (step, key)


def test_a_rank_whose_state_is_the_same_writes_by_a_new_plan_when_another_rank_has_changed(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_what_another_rank_has_changed, 2, tmp_path)


def answer_of_a_fork(act: Callable[[], object]) -> str:
    """Return the error of what a forked child does, "" for none; it then ends without a word to pytest."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_saves_gets_an_error_and_one_that_closes_its_copy_changes_nothing(
    tmp_path: Path,
) -> None:
    with single_process_checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, ones())
        assert answer_of_a_fork(checkpointer.close) == ""  # it waits for nothing: it has none of the threads
        checkpointer.save(2, ones())
        checkpointer.wait()
        text = answer_of_a_fork(lambda: checkpointer.save(3, ones()))
        assert re.match("DeclarationError: .*Create another Checkpointer here", text)
        checkpointer.save(4, ones())
    assert checkpointer.steps() == (1, 2, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_starts_a_writer_of_its_own(tmp_path: Path) -> None:
    def save(name: str, step: int) -> None:
        with Checkpointer(tmp_path / name, async_save=True) as checkpointer:
            checkpointer.save(step, {"w": torch.ones(4)})

    save("parent", 1)  # its writer is idle then, and could be taken by another
    assert answer_of_a_fork(lambda: save("child", 1)) == ""
    assert Checkpointer(tmp_path / "child").steps() == (1,)
    save("parent", 2)
    assert Checkpointer(tmp_path / "parent").steps() == (1, 2)


@pytest.mark.parametrize("error", [None, "no locked memory"])
def test_a_state_on_a_device_is_staged_in_memory_that_is_pinned_until_close_if_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str | None
) -> None:
    pinned: list[int] = []

    def pin(array: ByteArray, device: torch.device) -> None:
        if error is not None:
            raise RuntimeError(error)
        pinned.append(array.nbytes)

    monkeypatch.setattr(staging_memory, "pin", pin)
    monkeypatch.setattr(staging_memory, "unpin", lambda array: pinned.remove(array.nbytes))
    monkeypatch.setattr(local_state, "follow", lambda tensors: None)
    values = torch.randn(3000, 7, generator=torch.Generator().manual_seed(0)).t()

    def state(data: torch.Tensor) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", data)}

    with single_process_checkpointer(tmp_path, async_save=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(values.as_subclass(OnDevice)))
            checkpointer.wait()
            assert pinned == ([] if error else [saver_of(checkpointer).staging_nbytes])
    assert pinned == []
    assert caplog.text.count("cannot be pinned (no locked memory)") == bool(error)
    for step in (1, 2):
        loaded = load(state(torch.zeros(7, 3000)), tmp_path / f"iter_{step:07}")
        assert torch.equal(loaded["w"].view(torch.int32), values.contiguous().view(torch.int32))
