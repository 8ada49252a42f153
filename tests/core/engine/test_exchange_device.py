"""Data goes from device to device only where every rank has tensors on one; else it goes through the host."""

from __future__ import annotations

import pytest
import torch

from megackpt import LoadOptions, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.comm.device_group import DeviceGroup
from megackpt.engine.loading.exchange import RankRequest
from megackpt.mapping.describe import describe
from megackpt.options import Exchange
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.core.formats.test_sharded_files import fake_rank


def request(*tensors: ShardedTensor) -> RankRequest:
    return RankRequest(describe(tensors, rank=0), tensors, [])


def test_the_device_of_a_request_is_the_first_that_is_not_the_host() -> None:
    host = ShardedTensor.from_rank_offsets("h", torch.zeros(3))
    meta = ShardedTensor.from_rank_offsets("m", torch.zeros(3, device="meta"))
    without = ShardedTensor("n", None, torch.float32, (3,), (3,), (0,))
    assert request().device == torch.device("cpu")
    assert request(host, without).device == torch.device("cpu")
    assert request(without, host, meta).device == torch.device("meta")


@pytest.mark.parametrize("mode", ["broadcast", "two_stage"])
def test_tensors_on_the_host_never_use_the_backend_of_devices(
    mode: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broadcast(self: DeviceGroup, data: torch.Tensor, *, root: int) -> torch.Tensor:
        raise AssertionError("data went to a device")

    monkeypatch.setattr(DeviceGroup, "broadcast", broadcast)
    store = MemoryStore()
    whole = torch.arange(1000.0)
    save({"w": ShardedTensor.from_rank_offsets("w", whole)}, store)

    def loaded(group: Group) -> torch.Tensor:
        wanted = ShardedTensor.from_rank_offsets("w", torch.zeros(1000), replica_id=group.rank)
        options = LoadOptions(exchange=mode, cpu_transfer=False)
        load({"w": wanted}, store, options=options, group=group)
        assert wanted.data is not None
        return wanted.data

    with fake_rank(0, 2):
        tensors = SimulatedWorld(2).run(loaded)
    assert all(torch.equal(tensor, whole) for tensor in tensors)
