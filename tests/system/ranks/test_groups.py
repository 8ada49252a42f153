"""Groups of real processes: messages, stores that are stopped, and what is left when a program ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megackpt import RankFailedError
from megackpt.comm import TorchGroup
from megackpt.comm.store_client import StoreClient, StoreTimeoutError
from megackpt.comm.store_group import StoreGroup
from megackpt.comm.store_host import StoreAddress, connect_store
from megackpt.errors import WriterFailedError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.megatron_world import may_start_processes
from tests.support.effort import with_all
from tests.support.writers import is_alive, stop_process, store_process

_PROGRAM = """
import atexit
import sys
from pathlib import Path

def say():  # registered first, so called last
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    print(sum("gloo" in name for name in threads))

atexit.register(say)
import torch.distributed as dist
from megackpt.comm import world_group
from megackpt.comm.process_groups import torch_subgroup

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
groups = world_group(timeout_s=60), torch_subgroup(dist.new_group([0, 1]), timeout_s=30)
for group in groups:
    assert group.all_gather(b"some") == [b"some", b"some"]
say()
dist.destroy_process_group()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_no_thread_of_gloo_is_left_when_python_ends(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(tmp_path / "meet"), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        message = [process.communicate(timeout=300)[0].split() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    for before, after in message:
        assert int(before) > int(after) == 0


def look_when_it_is_idle() -> None:
    rank, group = dist.get_rank(), TorchGroup(timeout_s=60)
    assert group.is_idle
    assert group.all_reduce_max([rank], step=b"one") == [1]
    assert group.is_idle
    child = os.fork()
    if not child:
        os._exit(group.is_idle)  # it would wait for threads that it does not have
    assert os.waitpid(child, 0)[1] == 0
    group.close()
    with pytest.raises(RankFailedError, match="closed"):
        group.all_gather(b"")
    broken_off = TorchGroup(timeout_s=60)
    with pytest.raises(RankFailedError):
        broken_off.gather(b"") if rank else broken_off.all_gather(b"")
    assert rank == 0 or not broken_off.is_idle


def test_a_group_is_idle_unless_it_is_of_another_process_or_a_collective_was_broken_off(
    rank_pool: RankPool,
) -> None:
    rank_pool.run(look_when_it_is_idle, 2)


_CALLER = """
import atexit, os, signal, socket, sys
from tests.support.writers import stop_process
others = socket.socketpair(), socket.socket()  # connections that are none of ours, or none
server, port = int(sys.argv[1]), int(sys.argv[2])
# Registered first, so called last: a thread that waits for it would come back while the interpreter ends.
atexit.register(os.kill, server, signal.SIGKILL)
from megackpt.comm.store_host import StoreAddress, connect_store
client = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
client._answer_s = 0.3
stop_process(server)
try:
    client.get("key")
except RuntimeError as error:
    print(error)
"""


LONG_S = 120.0


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    with store_process() as process_and_port:
        yield process_and_port


def test_no_call_of_a_store_whose_process_is_stopped_outlasts_its_deadline(server: tuple[int, int]) -> None:
    process, port = server
    address = StoreAddress("127.0.0.1", port)
    calls: dict[str, Callable[[StoreClient], object]] = {
        "get": lambda c: c.get("key"),
        "add": lambda c: c.add("count", 1),
        "check": lambda c: c.check(["key"]),
        "compare_set": lambda c: c.compare_set("other", "", "value"),
        "delete_key": lambda c: c.delete_key("key"),
        "num_keys": lambda c: c.num_keys(),
        "wait": lambda c: c.wait(["none"], timedelta(seconds=0.1)),
    }
    clients = {name: connect_store(address, timeout_s=30) for name in (*calls, "group")}
    clients["get"].set("key", b"value")
    assert clients["check"].check(["key"])
    assert clients["get"].get("key") == b"value"
    with pytest.raises(dist.DistStoreError):  # an answer
        clients["wait"].wait(["none"], timedelta(seconds=0.1))
    stop_process(process)
    for name, call in calls.items():
        clients[name]._answer_s = 0.2
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"no answer within 0\.2 s"):
            call(clients[name])
        clients[name]._answer_s = LONG_S  # not waited for again
        with pytest.raises(StoreTimeoutError):
            call(clients[name])
        assert time.monotonic() - began < LONG_S, name
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} cannot be reached: no answer within"):
        connect_store(address, timeout_s=0.2)
    clients["group"]._answer_s = 0.2
    group = StoreGroup(clients["group"], prefix="job", rank=1, size=2, timeout_s=2 * LONG_S)
    with pytest.raises(WriterFailedError, match=r"Rank 0, which hosts the store .* did not answer") as raised:
        group.all_gather(b"")
    assert raised.value.rank == 0
    group.leave()
    assert time.monotonic() - began < LONG_S


def test_an_interpreter_ends_in_order_while_a_call_is_stuck(server: tuple[int, int]) -> None:
    process, port = server
    program = subprocess.run(
        [sys.executable, "-c", _CALLER, str(process), str(port)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (program.returncode, program.stdout) == (0, "no answer within 0.3 s\n"), program.stderr
    assert "Exception ignored" not in program.stderr


KEPT: list[Any] = []


def start_manager() -> int:
    """Start a process that lives as long as this one, and return its id."""
    with may_start_processes():
        manager: Any = get_context("spawn").Manager()
    KEPT.append(manager)
    return int(manager._process.pid)


@with_all("only code of Megatron-Core starts processes on a rank")
def test_what_a_rank_has_started_ends_with_the_pool() -> None:
    pool = RankPool()
    processes = [*pool.pids(2), *pool.run(start_manager, 2)]
    assert all(map(is_alive, processes))
    pool.close()
    assert not any(map(is_alive, processes))


def file_of_the_store() -> str:
    return str(dist.distributed_c10d._get_default_store().underlying_store.path)


def test_the_folder_of_a_job_s_store_is_there_until_the_pool_is_closed() -> None:
    """A rank may destroy its store after the job. If the file goes just then, the destructor waits for it."""
    pool = RankPool()
    try:
        (path,) = set(pool.run(file_of_the_store, 2))
        assert Path(path).parent.exists()
    finally:
        pool.close()
    assert not Path(path).parent.exists()
