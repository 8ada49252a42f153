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


def peak_of_a_resharded_load(directory: Path, kind: str) -> int:
    """Return by how much loading a 1 GiB array in other pieces than stored raised resident memory."""
    rows, columns = 16384, STATE_BYTES // 4 // 16384
    array = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    if not directory.exists():
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", array)}, directory)
    target = torch.zeros_like(array)
    if kind == "columns":
        halves = [target[:, : columns // 2], target[:, columns // 2 :]]
        asked = [ShardedTensor.from_rank_offsets("w", h, (1, i, 2)) for i, h in enumerate(halves)]
    else:
        pieces = target.view(-1).split(array.numel() // 7)  # flat ranges that begin and end within rows
        starts = [i * (array.numel() // 7) for i in range(len(pieces))]
        asked = [
            ShardedTensor.from_rank_offsets_flat(
                "w", p, (rows, columns), flattened_range=slice(s, s + p.numel())
            )
            for s, p in zip(starts, pieces, strict=True)
        ]
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    megackpt.load({"w": asked}, directory)
    extra = resident("VmHWM") - before
    assert all(torch.equal(a, b) for a, b in zip(target.split(512), array.split(512), strict=True))
    return extra


@pytest.mark.parametrize("kind", ["columns", "flat"])
def test_a_resharded_load_of_1_gib_adds_at_most_64_mib(
    rank_pool: RankPool, tmp_path: Path, kind: str
) -> None:
    (extra,) = rank_pool.run(peak_of_a_resharded_load, 1, tmp_path / "c", kind)
    print(f"load as {kind}: peak beyond the state {extra / MIB:.1f} MiB")
    assert extra <= ALLOWED_BYTES


def test_save_and_load_add_at_most_64_mib_to_a_state_of_1_gib(rank_pool: RankPool, tmp_path: Path) -> None:
    for loading in (False, True):
        ((extra, state),) = rank_pool.run(peak_beyond_the_state, 1, tmp_path / "c", loading)
        print(
            f"{'load' if loading else 'save'}: state {state // MIB} MiB, peak beyond it {extra / MIB:.1f} MiB"
        )
        assert state == STATE_BYTES
        assert extra <= ALLOWED_BYTES
