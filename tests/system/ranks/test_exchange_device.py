"""Exchanges for tensors on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import LoadOptions, ShardedTensor
from megackpt.comm.device_group import DeviceGroup
from megackpt.engine.loading import exchange
from megackpt.testing.ranks import RankPool


def state(device: str, fill: bool) -> dict[str, Any]:
    """Return replicated tensors, one of them a view that is not contiguous."""
    made = {}
    for i in range(5):
        data = torch.arange(400_000.0).reshape(1000, 400) + i
        data = (data if fill else torch.zeros_like(data)).to(device)
        data = data.t().contiguous().t() if i == 3 else data
        made[str(i)] = ShardedTensor.from_rank_offsets(f"w{i}", data, replica_id=dist.get_rank())
    return made


def load_to(directory: Path, device: str, way: Any, cpu_transfer: bool) -> list[int]:
    """Return how many broadcasts went from device to device on this rank."""
    if device != "cpu":
        torch.cuda.set_device(0)
    megackpt.save(state(device, True), directory)
    wanted = state(device, False)
    sent = []
    plain = DeviceGroup.broadcast

    def counted(self: DeviceGroup, data: torch.Tensor, *, root: int) -> torch.Tensor:
        arrived = plain(self, data, root=root)
        sent.append(arrived.device.type)
        return arrived

    DeviceGroup.broadcast = counted  # type: ignore[method-assign]
    try:
        options = LoadOptions(exchange=way, exchange_bytes=1 << 20, cpu_transfer=cpu_transfer)
        megackpt.load(wanted, directory, options=options, exchange_group=dist.group.WORLD)
    finally:
        DeviceGroup.broadcast = plain  # type: ignore[method-assign]
    for key, true in state(device, True).items():
        assert torch.equal(wanted[key].data, true.data)
    assert all(kind == device for kind in sent)
    return [len(sent)]


@pytest.mark.parametrize("way", ["broadcast", "two_stage"])
def test_on_the_host_cpu_transfer_changes_nothing(rank_pool: RankPool, tmp_path: Path, way: str) -> None:
    assert rank_pool.run(load_to, 2, tmp_path / "c", "cpu", way, False) == [[0], [0]]


def load_as_if_on_a_device(directory: Path, way: Any) -> int:
    """Take the path of device tensors with the host as the device; return how many broadcasts there were."""
    plain, exchange._has_device = exchange._has_device, lambda wanted: b"device"
    broadcast, calls = DeviceGroup.broadcast, []

    def counted(self: DeviceGroup, data: torch.Tensor, *, root: int) -> torch.Tensor:
        calls.append(root)
        return broadcast(self, data, root=root)

    DeviceGroup.broadcast = counted  # type: ignore[method-assign]
    try:
        load_to(directory, "cpu", way, False)
    finally:
        exchange._has_device, DeviceGroup.broadcast = plain, broadcast  # type: ignore[method-assign]
    return len(calls)


@pytest.mark.parametrize("way", ["broadcast", "two_stage"])
def test_the_given_group_itself_broadcasts_where_nothing_goes_through_the_host(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    first, second = rank_pool.run(load_as_if_on_a_device, 2, tmp_path / "c", way)
    assert first == second > 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["all_to_all", "broadcast", "gather_rounds", "gather_object", "two_stage"])
def test_tensors_on_a_device_are_loaded_through_the_host(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    assert rank_pool.run(load_to, 2, tmp_path / "c", "cuda", way, True) == [[0], [0]]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["broadcast", "two_stage"])
def test_tensors_on_a_device_are_broadcast_between_devices(
    rank_pool: RankPool, tmp_path: Path, way: str
) -> None:
    # The ranks share a device here, which gloo can broadcast on and NCCL rejects.
    (first,), (second,) = rank_pool.run(load_to, 2, tmp_path / "c", "cuda", way, False)
    assert first == second > 0
