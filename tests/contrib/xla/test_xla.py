"""Tensors that XLA has sharded: leaves of state dicts and of torch.distributed.checkpoint, and their law.

What one SPMD world saved, any other loads, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

import megackpt
from megackpt import load, save
from megackpt.comm import Group
from megackpt.contrib.xla import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
    XlaLoadPlanner,
    XlaSavePlanner,
    declare_xla,
)
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.data.tensor_bytes import as_bits
from megackpt.entities import ShardedTensor
from megackpt.errors import CoverageError, DeclarationError, IntegrityError
from megackpt.storage import MemoryStore
from megackpt.testing.layouts import OwnedChunk, arrays, owned_chunks
from megackpt.testing.ranks import RankPool
from megackpt.testing.spmd import SpmdLayout, XLAShardedTensor, spmd_layouts
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import flip
from tests.support.dcp_alone import ALONE
from tests.support.states import bits

ARRAY = torch.arange(20.0).reshape(4, 5)
HALVES_TWICE = SpmdLayout((2, 1), 2, (0, 1, 2, 3), 1)  # one host: devices 0 and 1 hold the same half
INTERPRETER = "MEGACKPT_XLA_PYTHON"


def on_devices(tensor: XLAShardedTensor) -> list[Any]:
    return [shard.elements().tolist() for shard in tensor.devices]


@pytest.mark.parametrize(
    ("layout", "starts"),
    [
        (HALVES_TWICE, [[0, 0], [2, 0]]),
        (SpmdLayout((1, 1), 4, (0, 1, 2, 3), 2), [[0, 0]]),  # replicated on two hosts
    ],
)
def test_copies_of_a_shard_are_stored_once(layout: SpmdLayout, starts: list[list[int]]) -> None:
    store = MemoryStore()
    save_spmd(ARRAY, layout, store)
    assert open_checkpoint(store).chunks(["w"]).table.start.tolist() == starts


def test_loading_fills_the_devices_once_and_returns_the_tensor_itself(tmp_path: Path) -> None:
    megackpt.save({"w": SpmdLayout((1, 3), 1, (2, 0, 1), 1).tensor(ARRAY, 0), "step": 7}, tmp_path)
    target = HALVES_TWICE.tensor(torch.zeros(4, 5), 0)
    loaded = megackpt.load({"w": target}, tmp_path)
    assert loaded["w"] is target
    assert loaded["step"] == 7
    assert target.loads == 1


def test_a_load_that_fails_leaves_the_devices_as_they_were(tmp_path: Path) -> None:
    source = {"a": HALVES_TWICE.tensor(ARRAY, 0), "b": HALVES_TWICE.tensor(ARRAY, 0)}
    megackpt.save(source, tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    flip(file, -1)
    target = {key: HALVES_TWICE.tensor(torch.zeros(4, 5), 0) for key in source}
    with pytest.raises(IntegrityError, match="'b'"):
        megackpt.load(target, tmp_path)
    assert [tensor.loads for tensor in target.values()] == [0, 0]


def test_a_sharded_tensor_is_declared_under_a_key_and_no_other(tmp_path: Path) -> None:
    megackpt.save({"w": declare_xla("decoder.weight", HALVES_TWICE.tensor(ARRAY, 0))}, tmp_path)
    assert list(megackpt.load_plain_tensors(tmp_path)) == ["decoder.weight"]
    with pytest.raises(DeclarationError, match=r"'w': a Tensor that XLA has not sharded.*mark_sharding"):
        declare_xla("w", torch.zeros(2))


def test_a_shard_that_its_indices_do_not_describe_raises_an_error(tmp_path: Path) -> None:
    tensor = HALVES_TWICE.tensor(ARRAY, 0)
    tensor.devices[2].data = ARRAY.clone()  # the whole array where half of it is said to be
    with pytest.raises(DeclarationError, match=r"'w': a shard of shape \(4, 5\) at \(2, 0\).*sync"):
        megackpt.save({"w": tensor}, tmp_path)


def test_shards_are_copied_when_nothing_runs_on_the_devices_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = HALVES_TWICE.tensor(ARRAY, 0)
    copied_before: list[int] = []
    torch_xla = SimpleNamespace(wait_device_ops=lambda: copied_before.append(tensor.copies_out))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", torch_xla)  # type: ignore[arg-type]
    megackpt.save({"w": tensor}, MemoryStore())
    assert copied_before == [0]


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_dcp_planners_keep_every_shard_where_a_host_holds_it_twice(tmp_path: Path) -> None:
    state = {"w": HALVES_TWICE.tensor(ARRAY, 0), "plain": torch.arange(3), "step": 7}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=XlaSavePlanner(), **ALONE)
    whole = {"w": torch.zeros(4, 5)}
    dcp.load(whole, checkpoint_id=tmp_path, **ALONE)  # with torch's own planner
    assert torch.equal(whole["w"], ARRAY)
    other = SpmdLayout((1, 2), 1, (1, 0), 1)
    target = {"w": other.tensor(torch.zeros(4, 5), 0), "plain": torch.zeros(3).long(), "step": 0}
    dcp.load(target, checkpoint_id=tmp_path, planner=XlaLoadPlanner(), **ALONE)
    assert on_devices(target["w"]) == on_devices(other.tensor(ARRAY, 0))
    assert target["w"].loads == 1
    assert (target["plain"].tolist(), target["step"]) == ([0, 1, 2], 7)


def test_the_dcp_planners_have_the_names_of_those_of_torch_xla() -> None:
    assert (SPMDSavePlanner, SPMDLoadPlanner) == (XlaSavePlanner, XlaLoadPlanner)


def save_and_load_with_dcp(directory: Path) -> list[Any]:
    """On each of two hosts of four devices: halves, each on both hosts; and a replicated tensor."""
    host = dist.get_rank()
    layout = SpmdLayout((2, 1), 4, (0, 4, 1, 5, 2, 6, 3, 7), 2)
    same = SpmdLayout((1, 1), 8, tuple(range(8)), 2)
    state = {"model": {"w": layout.tensor(ARRAY, host), "same": same.tensor(ARRAY, host)}}
    dcp.save(state, checkpoint_id=directory, planner=XlaSavePlanner())
    other = SpmdLayout((2, 4), 1, (7, 3, 5, 1, 0, 2, 4, 6), 2)
    zeros = torch.zeros(4, 5)
    target = {"model": {"w": other.tensor(zeros, host), "same": same.tensor(zeros, host)}}
    dcp.load(target, checkpoint_id=directory, planner=XlaLoadPlanner())
    expected = [on_devices(other.tensor(ARRAY, host)), on_devices(same.tensor(ARRAY, host))]
    return [[on_devices(target["model"]["w"]), on_devices(target["model"]["same"])], expected]


def test_dcp_planners_write_a_box_of_several_hosts_once(rank_pool: RankPool, tmp_path: Path) -> None:
    for got, expected in rank_pool.run(save_and_load_with_dcp, 2, tmp_path):
        assert got == expected
    meta = dcp.FileSystemReader(tmp_path).read_metadata()
    chunks = meta.state_dict_metadata["model.w"].chunks
    assert sorted(tuple(c.offsets) for c in chunks) == [(0, 0), (2, 0)]
    assert len(meta.state_dict_metadata["model.same"].chunks) == 1


def test_the_dcp_load_planner_notices_elements_that_no_save_kept() -> None:
    saver = XlaSavePlanner()
    saver.set_up_planner({"w": HALVES_TWICE.tensor(ARRAY, 0)}, is_coordinator=True)
    _, metadata = saver.create_global_plan([saver.create_local_plan()])
    metadata.state_dict_metadata["w"].chunks.pop()
    loader = XlaLoadPlanner()
    loader.set_up_planner({"w": HALVES_TWICE.tensor(ARRAY, 0)}, metadata, True)
    with pytest.raises(CoverageError, match="'w': the checkpoint has 10 of the 20 elements"):
        loader.finish_plan(loader.create_local_plan())


def test_torch_xla_itself_saves_and_loads(tmp_path: Path) -> None:
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(
            f"needs torch_xla, which fixes the version of torch: make an environment with torch==2.9.*, "
            f"torch_xla==2.9.* and megackpt's dependencies, and name its interpreter in {INTERPRETER}"
        )
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "PYTHONPATH": str(root)}
    script = Path(__file__).with_name("xla_program.py")
    ran = subprocess.run(
        [interpreter, script, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    sys.stdout.write(ran.stdout)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "every device has what was saved" in ran.stdout


SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def save_spmd(array: torch.Tensor, layout: SpmdLayout, store: MemoryStore) -> None:
    SimulatedWorld(layout.hosts).run(lambda g: save({"w": layout.tensor(array, g.rank)}, store, group=g))


def load_spmd(wrong: torch.Tensor, layout: SpmdLayout, store: MemoryStore) -> list[XLAShardedTensor]:
    def load_host(group: Group) -> XLAShardedTensor:
        tensor = layout.tensor(wrong, group.rank)
        assert load({"w": tensor}, store, group=group)["w"] is tensor
        return tensor

    return SimulatedWorld(layout.hosts).run(load_host)


def wrong_values(array: torch.Tensor) -> torch.Tensor:
    return as_bits(torch.ones_like(as_bits(array))).view(array.dtype)


def assert_on_all_devices(layout: SpmdLayout, hosts: list[XLAShardedTensor], array: torch.Tensor) -> None:
    for host, tensor in enumerate(hosts):
        for got, expected in zip(tensor.devices, layout.tensor(array, host).devices, strict=True):
            assert bits(got.elements()) == bits(expected.elements()), got.shard_device


def declare(layout: list[OwnedChunk], array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    return [owned.declare("w", array) for owned in layout if owned.rank == rank]


@SETTINGS
@given(data=st.data(), array=arrays(max_dims=3), ranks=st.integers(1, 3))
def test_spmd_worlds_and_ranks_load_what_the_other_saved(
    data: st.DataObject, array: torch.Tensor, ranks: int
) -> None:
    spmd = data.draw(spmd_layouts(array.ndim), label="spmd")
    owned = data.draw(owned_chunks(tuple(array.shape), ranks=ranks), label="ranks")
    store, back = MemoryStore(), MemoryStore()
    save_spmd(array, spmd, store)

    def through_ranks(group: Group) -> None:
        request = {"shards": declare(owned, wrong_values(array), group.rank)}
        load(request, store, group=group)
        save(request, back, group=group)

    SimulatedWorld(ranks).run(through_ranks)
    assert_on_all_devices(spmd, load_spmd(wrong_values(array), spmd, back), array)


def save_through_planners(state: list[XLAShardedTensor]) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Return the metadata and the stored boxes of a save by the hosts' DCP planners, without storage."""
    planners = []
    for host, tensor in enumerate(state):
        planner = XlaSavePlanner()
        planner.set_up_planner({"w": tensor}, is_coordinator=host == 0)
        planners.append(planner)
    plans, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    stored = {}
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(plan).items:
            assert item.index not in stored
            stored[item.index] = planner.resolve_data(item).clone()
    return metadata, stored


def load_through_planners(tensor: XLAShardedTensor, metadata: Any, stored: dict[Any, torch.Tensor]) -> None:
    planner = XlaLoadPlanner()
    planner.set_up_planner({"w": tensor}, metadata, True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    for i, item in enumerate(plan.items):
        assert tensor.loads == 0, f"on the devices before read {i} of {len(plan.items)}"
        source = stored[item.storage_index]
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(dim, start, length)
        target = planner.resolve_tensor(item)
        target.copy_(source)
        planner.commit_tensor(item, target)


def through_planners(array: torch.Tensor, source: SpmdLayout, target: SpmdLayout) -> list[XLAShardedTensor]:
    metadata, stored = save_through_planners([source.tensor(array, host) for host in range(source.hosts)])
    loaded = [target.tensor(wrong_values(array), host) for host in range(target.hosts)]
    for tensor in loaded:
        load_through_planners(tensor, metadata, stored)
    return loaded


def through_megackpt(array: torch.Tensor, source: SpmdLayout, target: SpmdLayout) -> list[XLAShardedTensor]:
    store = MemoryStore()
    save_spmd(array, source, store)
    return load_spmd(wrong_values(array), target, store)


@pytest.mark.parametrize("through", [through_megackpt, through_planners])
@SETTINGS
@given(data=st.data(), array=arrays(max_dims=3))
def test_any_spmd_world_loads_what_any_other_saved(
    through: Any, data: st.DataObject, array: torch.Tensor
) -> None:
    source = data.draw(spmd_layouts(array.ndim), label="source")
    target = data.draw(spmd_layouts(array.ndim), label="target")
    assert_on_all_devices(target, through(array, source, target), array)
