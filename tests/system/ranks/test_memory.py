"""Saving and loading need little memory beyond the state, measured as the peak of resident memory."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import LoadOptions, ShardedTensor
from megackpt.parallel import GatedExperts, ParallelGroups, ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.support.effort import with_all

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
    """Return by how much loading a 1 GiB array in other chunks than stored raised resident memory."""
    rows, columns = 16384, STATE_BYTES // 4 // 16384
    array = torch.arange(rows * columns, dtype=torch.int32).reshape(rows, columns)
    if not directory.exists():
        megackpt.save({"w": ShardedTensor.from_rank_offsets("w", array)}, directory)
    target = torch.zeros_like(array)
    if kind == "columns":
        halves = [target[:, : columns // 2], target[:, columns // 2 :]]
        asked = [ShardedTensor.from_rank_offsets("w", h, (1, i, 2)) for i, h in enumerate(halves)]
    else:
        parts = target.view(-1).split(array.numel() // 7)  # flat ranges that begin and end within rows
        starts = [i * (array.numel() // 7) for i in range(len(parts))]
        asked = [
            ShardedTensor.from_rank_offsets_flat(
                "w", p, (rows, columns), flattened_range=slice(s, s + p.numel())
            )
            for s, p in zip(starts, parts, strict=True)
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


def peak_of_an_exchange(directory: Path, way: Any, exchange_bytes: int, tensors: int) -> int:
    """Return by how much loading what all ranks hold raised resident memory on this rank."""
    numel = 32 * MIB // 4
    data = [torch.full((numel,), float(i)) for i in range(tensors)]
    state = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", t, replica_id=dist.get_rank())
        for i, t in enumerate(data)
    }
    options = LoadOptions(exchange=way, exchange_bytes=exchange_bytes)
    if not directory.exists():
        megackpt.save(state, directory)
    small = {"warm": ShardedTensor.from_rank_offsets("warm", torch.zeros(10), replica_id=dist.get_rank())}
    megackpt.save(small, directory.with_name("warm"))
    megackpt.load(small, directory.with_name("warm"), options=options)
    for tensor in data:
        tensor.zero_()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before shall not serve unseen
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    megackpt.load(state, directory, options=options)
    extra = resident("VmHWM") - before
    assert all(bool((t == float(i)).all()) for i, t in enumerate(data))
    return extra


def test_a_two_stage_load_adds_at_most_two_of_the_largest_tensors(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    extra = rank_pool.run(peak_of_an_exchange, 3, tmp_path / "c", "two_stage", 1024 * MIB, 6)
    print(f"two-stage: peaks beyond the state {[round(e / MIB, 1) for e in extra]} MiB")
    assert max(extra) <= 2 * 32 * MIB + 8 * MIB  # 8 MiB: messages, threads, plans


@pytest.mark.parametrize("way", ["all_to_all", "broadcast", "gather_rounds"])
def test_an_exchange_keeps_within_its_buffers(rank_pool: RankPool, tmp_path: Path, way: str) -> None:
    extra = rank_pool.run(peak_of_an_exchange, 3, tmp_path / "c", way, 16 * MIB, 6)
    print(f"{way}: peaks beyond the state {[round(e / MIB, 1) for e in extra]} MiB")
    assert max(extra) <= 16 * MIB + 8 * MIB


EXPERT_BYTES = 480 * MIB  # of all experts: 8 of 3 matrices of 1024 x 5120 in float32


def experts_of(groups: ParallelGroups) -> GatedExperts:
    """Return this rank's experts, each filled with its number."""
    experts = GatedExperts(8, 1024, 5120, groups)
    with torch.no_grad():
        for param in experts.parameters():
            for local, expert in enumerate(param):
                expert.fill_(groups.ep.rank * len(param) + local)
    return experts


def peaks_of_experts(
    layout: ParallelLayout, source: Path | None, target: Path, warm: Path
) -> tuple[int, int, int]:
    """Load stacked experts, and save them; return the peaks of both beyond the state, and its size."""
    groups = ParallelGroups.create(layout)
    experts = experts_of(groups)
    state = experts.sharded_state_dict("experts.")
    small = {"warm": ShardedTensor.from_rank_offsets("warm", torch.zeros(10), replica_id=groups.rank)}
    megackpt.save(small, warm)  # what is imported lazily is not the state's memory
    megackpt.load(small, warm)
    loading = 0
    if source is not None:
        with torch.no_grad():
            for param in experts.parameters():
                param.zero_()
        before = start_of_peak()
        megackpt.load(state, source, options=LoadOptions(complete=True))
        loading = resident("VmHWM") - before
    before = start_of_peak()
    megackpt.save(state, target)
    saving = resident("VmHWM") - before
    for param in experts.parameters():
        for local, expert in enumerate(param):
            number = float(groups.ep.rank * len(param) + local)
            assert all(bool((row == number).all()) for row in expert)
    return loading, saving, sum(p.nbytes for p in experts.parameters())


def start_of_peak() -> int:
    """Start to measure a peak of resident memory; return how much is resident now."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before shall not serve unseen
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


@with_all("the other tests measure dense arrays")
def test_experts_of_two_ranks_on_one_in_slices_and_back_add_at_most_64_mib(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    by_expert, by_slice = ParallelLayout(dp=2, ep=2), ParallelLayout(dp=2, etp=2)
    source = None
    for step, layout in enumerate((by_expert, ParallelLayout(), by_slice, by_expert)):
        ranks = layout.world_size
        target, warm = tmp_path / f"{step}", tmp_path / f"warm-{step}"
        results = rank_pool.run(peaks_of_experts, ranks, layout, source, target, warm)
        for loading, saving, state in results:
            print(
                f"{ranks} ranks, ep={layout.ep}, etp={layout.etp}: state {state / MIB} MiB, peaks beyond it: "
                f"load {loading / MIB:.1f} MiB, save {saving / MIB:.1f} MiB"
            )
            assert state == EXPERT_BYTES // ranks
            assert max(loading, saving) <= ALLOWED_BYTES
        if source is not None:
            shutil.rmtree(source)
        source = target
