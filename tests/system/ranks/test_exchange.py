"""Loads in which real ranks read for each other: what is read, what arrives, and what happens on failure."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import IntegrityError, LoadOptions, ShardedObject, ShardedTensor
from megackpt.comm.process_groups import DeviceGroup
from megackpt.engine.loading import exchange
from megackpt.storage import LocalStore
from megackpt.testing.ranks import RankPool
from tests.support.checkpoints import flip
from tests.support.counting import CountingStore

WAYS = ("all_to_all", "two_stage")
KIB, MIB = 1 << 10, 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Return tensors of several sizes and dtypes, equal on all ranks, 13 MiB in all."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(1024, 512), (300, 1024), (513,), (1,), (1024, 1024), (700, 1000), (64, 64, 64), (20_000,)]
    made = {f"t{i}": torch.rand(shape, generator=generator) for i, shape in enumerate(shapes)}
    made["half"] = torch.rand(1000, 512, generator=generator).to(torch.bfloat16)
    return made


def replicated(fill: bool) -> dict[str, Any]:
    """Return state that every rank holds whole; rank 0 has the main replicas."""
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(
            key, t if fill else torch.zeros_like(t), replica_id=dist.get_rank()
        )
        for key, t in tensors().items()
    }
    state["thing"] = ShardedObject("thing", {"seen": 3} if fill else None, (1,), (0,), dist.get_rank())
    return state


def save_replicated(directory: Path) -> None:
    megackpt.save(replicated(True), directory)


def load_replicated(directory: Path, way: Any) -> tuple[int, bool]:
    """Return how many bytes this rank read, and whether it has got all the right ones."""
    store = CountingStore(directory)
    options = LoadOptions(exchange=way, exchange_bytes=4 * MIB)
    loaded = megackpt.load(replicated(False), store, options=options)
    is_right = all(torch.equal(loaded[key], t) for key, t in tensors().items())
    return store.nbytes, is_right and loaded["thing"] == {"seen": 3}


def data_nbytes(directory: Path) -> int:
    """Bytes of all chunks of a checkpoint."""
    count = 0
    for file in (directory / "data").iterdir():
        content = file.read_bytes()
        count += len(content) - 8 - int.from_bytes(content[:8], "little")
    return count


def test_a_fully_parallel_load_reads_each_byte_once_and_a_direct_one_on_every_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    """What is damaged then is found by one reader, raised on all and named."""
    rank_pool.run(save_replicated, 8, tmp_path / "c")
    size = data_nbytes(tmp_path / "c")
    for way in ("direct", *WAYS):
        counted, right = zip(*rank_pool.run(load_replicated, 8, tmp_path / "c", way), strict=True)
        print(f"{way}: {size:,} bytes stored, read by rank {counted}")
        assert all(right)
        assert sum(counted) == (8 * size if way == "direct" else size)
        if way == "two_stage":
            assert counted == (size, *[0] * 7)
        elif way == "all_to_all":
            assert max(counted) - size / 8 <= max(0.05 * size / 8, 256 * KIB)
    file = max((tmp_path / "c" / "data").iterdir(), key=lambda f: f.stat().st_size)
    flip(file, file.stat().st_size // 2)
    for way in WAYS:
        outcomes = rank_pool.outcomes(load_replicated, 8, tmp_path / "c", way)
        (text,) = {str(outcome.error) for outcome in outcomes}
        (rank,) = {getattr(outcome.error, "rank", None) for outcome in outcomes}
        assert isinstance(outcomes[0].error, IntegrityError)
        assert text.startswith(f"Rank {rank} failed while reading: ")
        assert file.name in text
        assert "failed too" not in text, "a rank that waits for another has not failed itself"


class BrokenStore(LocalStore):
    def stream_into(self, *arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    borrow = stream_into


def load_in_groups(directory: Path, way: Any, broken: int | None) -> tuple[int, bool]:
    """Load halves of columns by tensor-parallel rank, in two groups; one rank may have a broken store."""
    tp, replica = dist.get_rank() % 2, dist.get_rank() // 2
    groups = [dist.new_group([first, first + 2]) for first in range(2)]
    halves = {key: t.chunk(2, dim=1)[tp] if t.ndim == 2 else t for key, t in tensors().items()}
    wanted = {
        key: ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(t), *([(1, tp, 2)] if t.ndim == 2 else []), replica_id=replica
        )
        for key, t in halves.items()
    }
    store = CountingStore(directory)
    used = BrokenStore(directory) if dist.get_rank() == broken else store
    options = LoadOptions(exchange=way, exchange_bytes=2 * MIB)
    megackpt.load(wanted, used, options=options, exchange_group=groups[tp])
    return store.nbytes, all(torch.equal(wanted[key].data, t) for key, t in halves.items())


def test_groups_side_by_side_read_each_byte_once_per_group_and_raise_the_failure_of_one_in_all(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_replicated, 4, tmp_path / "c")
    size = sum(t.nbytes for t in tensors().values())
    for way in WAYS:
        counted, right = zip(*rank_pool.run(load_in_groups, 4, tmp_path / "c", way, None), strict=True)
        assert all(right)
        # A column of a matrix lies in every block of its file range, so each group reads all blocks.
        assert [counted[0] + counted[2], counted[1] + counted[3]] == [size, size]
    for outcome in rank_pool.outcomes(load_in_groups, 4, tmp_path / "c", "all_to_all", 3):
        assert isinstance(outcome.error, megackpt.CheckpointError)
        assert "Rank 3 failed while reading: OSError: [Errno 5]" in str(outcome.error)
        assert outcome.error.rank == 3


def load_transposed_and_cast(directory: Path, way: Any) -> bool:
    """Load into tensors that are no plain memory: strided views, another dtype, flat ranges."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = tensors()
    column = torch.zeros(1024, 1024)[:, ::2]
    cast = torch.zeros(300, 1024, dtype=torch.float64)
    numel = 1024 * 1024 // size
    flat = torch.zeros(2 * numel)[::2]
    at = slice(rank * numel, (rank + 1) * numel)
    state = {
        "strided": ShardedTensor.from_rank_offsets("t0", column, replica_id=rank),
        "cast": ShardedTensor.from_rank_offsets("t1", cast, replica_id=rank),
        "flat": ShardedTensor.from_rank_offsets_flat("t4", flat, (1024, 1024), flattened_range=at),
    }
    rules = (megackpt.KeyRule(keys="t1", cast=megackpt.Policy.IGNORE),)
    megackpt.load(state, directory, options=LoadOptions(exchange=way, exchange_bytes=MIB, rules=rules))
    return (
        torch.equal(column, whole["t0"])
        and torch.equal(cast, whole["t1"].double())
        and torch.equal(flat, whole["t4"].view(-1)[at])
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_exchanged_goes_into_views_casts_and_flat_ranges(
    rank_pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    rank_pool.run(save_replicated, ranks, tmp_path / "c")
    for way in WAYS:
        assert all(rank_pool.run(load_transposed_and_cast, ranks, tmp_path / "c", way))


def load_with_unlike_memberships(directory: Path, way: Any) -> bool:
    """Load over all ranks and over half of them; rank 0 is a member of more groups than the others."""
    for members in ([0, 3], [0]):
        dist.new_group(members, backend="gloo", use_local_synchronization=True)
    parts = [dist.new_group(half, backend="gloo") for half in ([0, 1], [2, 3])]
    everyone = dist.group.WORLD
    assert everyone is not None
    for group in (everyone, parts[dist.get_rank() // 2]):
        loaded = megackpt.load(
            replicated(False),
            directory,
            options=LoadOptions(exchange=way, timeout_s=60),
            exchange_group=group,
        )
        if not all(torch.equal(loaded[key], t) for key, t in tensors().items()):
            return False
    return True


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_are_members_of_different_numbers_of_groups_find_each_other(
    way: str, rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_replicated, 4, tmp_path / "c")
    assert rank_pool.run(load_with_unlike_memberships, 4, tmp_path / "c", way) == [True] * 4


def state(device: str, fill: bool) -> dict[str, Any]:
    """Return replicated tensors, one of them a view that is not contiguous."""
    made = {}
    for i in range(5):
        data = torch.arange(400_000.0).reshape(1000, 400) + i
        data = (data if fill else torch.zeros_like(data)).to(device)
        data = data.t().contiguous().t() if i == 3 else data
        made[str(i)] = ShardedTensor.from_rank_offsets(f"w{i}", data, replica_id=dist.get_rank())
    return made


def load_to(directory: Path, device: str, way: Any, cpu_transfer: bool) -> int:
    """Return how many broadcasts went from device to device on this rank."""
    if device == "cuda":
        torch.cuda.set_device(0)
    real_device = "cpu" if device == "as if on a device" else device
    megackpt.save(state(real_device, True), directory)
    wanted = state(real_device, False)
    sent = []
    plain = DeviceGroup.broadcast

    def counted(self: DeviceGroup, data: torch.Tensor, *, root: int) -> torch.Tensor:
        arrived = plain(self, data, root=root)
        sent.append(arrived.device.type)
        return arrived

    with ExitStack() as patches:
        patches.enter_context(patch.object(DeviceGroup, "broadcast", counted))
        if real_device != device:
            patches.enter_context(patch.object(exchange, "_has_device", lambda wanted: b"device"))
        options = LoadOptions(exchange=way, exchange_bytes=1 << 20, cpu_transfer=cpu_transfer)
        megackpt.load(wanted, directory, options=options, exchange_group=dist.group.WORLD)
    for key, true in state(real_device, True).items():
        assert torch.equal(wanted[key].data, true.data)
    assert all(kind == real_device for kind in sent)
    return len(sent)


@pytest.mark.parametrize(
    ("device", "way", "cpu_transfer", "broadcasts"),
    [
        ("cpu", "two_stage", False, False),
        ("as if on a device", "two_stage", False, True),
        *(pytest.param("cuda", way, True, False, marks=pytest.mark.gpu) for way in WAYS),
        # The ranks share a device here, which gloo can broadcast on and NCCL rejects.
        pytest.param("cuda", "two_stage", False, True, marks=pytest.mark.gpu),
    ],
)
def test_the_given_group_itself_broadcasts_what_is_on_devices_unless_it_goes_through_the_host(
    rank_pool: RankPool, tmp_path: Path, device: str, way: str, cpu_transfer: bool, broadcasts: bool
) -> None:
    first, second = rank_pool.run(load_to, 2, tmp_path / "c", device, way, cpu_transfer)
    assert first == second
    assert (first > 0) == broadcasts
