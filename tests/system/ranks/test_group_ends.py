"""What is left of groups when a program ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from megackpt import RankFailedError
from megackpt.comm import TorchGroup
from megackpt.testing.ranks import RankPool

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
from megackpt.comm.subgroups import torch_subgroup

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


def begin_at_different_times() -> None:
    rank, group = dist.get_rank(), TorchGroup(timeout_s=60)
    assert group.is_idle
    begun = group.begin_all_reduce_max([rank], step=b"one") if rank else None
    dist.barrier()
    is_idle = group.is_idle
    dist.barrier()  # rank 0 does not begin before rank 1 has looked
    assert is_idle == (rank == 0)  # what rank 1 has begun cannot be over
    begun = begun or group.begin_all_reduce_max([rank], step=b"one")
    assert begun() == [1]
    assert group.is_idle
    child = os.fork()
    if not child:
        os._exit(group.is_idle)  # it would wait for threads that it does not have
    assert os.waitpid(child, 0)[1] == 0
    group.close()
    with pytest.raises(RankFailedError, match="closed"):
        group.all_gather(b"")


def test_a_group_is_idle_unless_something_is_under_way(rank_pool: RankPool) -> None:
    rank_pool.run(begin_at_different_times, 2)


def break_off() -> None:
    group = TorchGroup(timeout_s=60)
    if dist.get_rank() == 0:
        group.all_gather(b"")
    else:
        with pytest.raises(RankFailedError):
            group.gather(b"")
        assert not group.is_idle


def test_a_group_in_which_a_collective_was_broken_off_is_not_idle(rank_pool: RankPool) -> None:
    assert rank_pool.outcomes(break_off, 2)[1].error is None
