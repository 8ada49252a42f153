"""Saving and loading need little memory beyond the state, measured as the peak of resident memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.testing.ranks import RankPool

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

MIB = 1 << 20
STATE_BYTES = 1024 * MIB
TENSORS = 16
ALLOWED_BYTES = 64 * MIB


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def peak_beyond_the_state(directory: Path, loading: bool) -> tuple[int, int]:
    """Return by how much save (or load) raised resident memory at its peak, and the size of the state."""
    numel = STATE_BYTES // TENSORS // 4
    tensors = [torch.full((numel,), float(i)) for i in range(TENSORS)]
    state = {str(i): ShardedTensor.from_rank_offsets(f"t{i}", t) for i, t in enumerate(tensors)}
    small = {"warm": ShardedTensor.from_rank_offsets("warm", torch.zeros(10))}
    megackpt.save(small, directory.with_name("warm"))  # what is imported lazily is not the state's memory
    megackpt.load(small, directory.with_name("warm"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    if loading:
        for tensor in tensors:
            tensor.zero_()
        megackpt.load(state, directory)
    else:
        megackpt.save(state, directory)
    extra = resident("VmHWM") - before
    assert all(bool((t == float(i)).all()) for i, t in enumerate(tensors))  # itself needs memory
    return extra, sum(t.nbytes for t in tensors)


def test_save_and_load_add_at_most_64_mib_to_a_state_of_1_gib(rank_pool: RankPool, tmp_path: Path) -> None:
    for loading in (False, True):
        ((extra, state),) = rank_pool.run(peak_beyond_the_state, 1, tmp_path / "c", loading)
        print(
            f"{'load' if loading else 'save'}: state {state // MIB} MiB, peak beyond it {extra / MIB:.1f} MiB"
        )
        assert state == STATE_BYTES
        assert extra <= ALLOWED_BYTES
