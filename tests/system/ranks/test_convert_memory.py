"""Converting needs little memory, however long the chunks are; measured as the peak of resident memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

import megackpt
from megackpt import ShardedTensor
from megackpt.testing.ranks import RankPool
from tests.support.effort import sampled

MIB = 1 << 20
CHUNK_BYTES = int(os.environ.get("MEGACKPT_TEST_CHUNK_MIB", "192")) * MIB
CHUNKS = 2
ALLOWED_BYTES = 100 * MIB
NATIVE = ("megackpt", 1)
OTHERS = [("zarr", 3), ("zarr", 1), ("torch_dist", 1)]


class Silent:
    def begin(self, doing: str, nbytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


def save_long_chunks(directory: Path) -> None:
    rows = CHUNK_BYTES // (4 * 1024)
    parts = [torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024) + i for i in range(CHUNKS)]
    state = [ShardedTensor.from_rank_offsets("w", half, (0, i, CHUNKS)) for i, half in enumerate(parts)]
    megackpt.save({"w": state, "step": 1}, directory)


def convert(source: Path, target: Path, strategy: tuple[str, int]) -> None:
    megackpt.convert(source, target, strategy)


def peak_of_a_conversion(source: Path, target: Path, strategy: tuple[str, int]) -> int:
    """Return by how much converting, verification included, raised resident memory at its peak."""
    warm = source.with_name(f"warm-{target.name}")  # what is imported lazily is no memory of the conversion
    megackpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(10))}, warm, strategy)
    convert(warm, warm.with_name(f"{warm.name}-again"), NATIVE)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    convert(source, target, strategy)
    return resident("VmHWM") - before


@sampled(6)
@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_converting_long_chunks_adds_at_most_100_mib(
    rank_pool: RankPool, tmp_path: Path, other: tuple[str, int]
) -> None:
    rank_pool.run(save_long_chunks, 1, tmp_path / "native")
    (there,) = rank_pool.run(peak_of_a_conversion, 1, tmp_path / "native", tmp_path / "other", other)
    (back,) = rank_pool.run(peak_of_a_conversion, 1, tmp_path / "other", tmp_path / "back", NATIVE)
    total = CHUNKS * CHUNK_BYTES // MIB
    print(f"{total} MiB in {CHUNKS} chunks: to {other} {there / MIB:.1f} MiB, back {back / MIB:.1f} MiB")
    assert there <= ALLOWED_BYTES
    assert back <= ALLOWED_BYTES
