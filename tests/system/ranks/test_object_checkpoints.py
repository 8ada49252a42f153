"""Checkpoints in an object store, over a real S3 server: ranks, steps, faults, kills, requests counted."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megackpt
from megackpt import Checkpointer, KeepBest, NotACheckpointError, Retention, ShardedTensor, StorageError
from megackpt.comm import Group, SingleProcess
from megackpt.errors import UnsupportedError
from megackpt.run import check_is_distributed_checkpoint
from megackpt.run.checkpointer import StepList
from megackpt.storage import MemoryStore, ObjectOptions, ObjectStore, Store
from megackpt.testing.faulty_store import FaultyStore, Operation
from megackpt.testing.ranks import RankPool
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import sampled
from tests.support.s3_server import BUCKET, FAULTS, FaultyProxy, S3Server, options_for, unfinished_uploads

_numbers = itertools.count()
ROWS, COLUMNS = 512, 1024  # 2 MiB, which is 8 parts


def new_url() -> str:
    return f"s3://{BUCKET}/ranks-{next(_numbers)}"


def weight(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def state(rank: int = 0, ranks: int = 1, *, axis: int = 0, seed: int | None = None) -> dict[str, Any]:
    """Return this rank's part of the weight of a seed, cut along an axis; zeros to be filled, without one."""
    whole = torch.zeros(ROWS, COLUMNS) if seed is None else weight(seed)
    part = whole.chunk(ranks, axis)[rank].clone()
    return {"w": ShardedTensor.from_rank_offsets("w", part, (axis, rank, ranks)), "seed": seed}


def own_state(axis: int = 0, seed: int | None = None) -> dict[str, Any]:
    return state(dist.get_rank(), dist.get_world_size(), axis=axis, seed=seed)


def is_loaded(loaded: dict[str, Any], seed: int, rank: int = 0, ranks: int = 1, *, axis: int = 0) -> bool:
    return loaded["seed"] == seed and torch.equal(loaded["w"], weight(seed).chunk(ranks, axis)[rank])


def is_own_loaded(loaded: dict[str, Any], seed: int, axis: int) -> bool:
    return is_loaded(loaded, seed, dist.get_rank(), dist.get_world_size(), axis=axis)


def holds(store: str | ObjectStore, seed: int) -> bool:
    """Return whether one process loads the weight of this seed."""
    return is_loaded(megackpt.load(state(), store, group=SingleProcess()), seed)


def save_alone(store: Store, seed: int) -> None:
    megackpt.save(state(seed=seed), store, group=SingleProcess())


# Ranks.


def _save_and_reshard(url: str, options: ObjectOptions) -> list[bool]:
    store = ObjectStore(url, options=options)
    megackpt.save(own_state(seed=1), store)
    results = [is_own_loaded(megackpt.load(own_state(axis), store), 1, axis) for axis in (0, 1)]
    store.close()
    return results


def test_ranks_save_and_load_at_the_same_and_at_other_layouts(
    rank_pool: RankPool, s3_server: S3Server
) -> None:
    url, options = new_url(), options_for(s3_server.port)
    assert rank_pool.run(_save_and_reshard, 2, url, options) == [[True, True]] * 2
    assert holds(ObjectStore(url, options=options), seed=1)


def test_the_environment_and_an_url_are_all_that_save_and_load_need(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, options = new_url(), options_for(s3_server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", options.config["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options.config["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options.config["secret_access_key"])
    megackpt.save(state(seed=3), f"{url}/iter_1")
    assert holds(f"{url}/iter_1", seed=3)
    assert check_is_distributed_checkpoint(f"{url}/iter_1")
    assert not check_is_distributed_checkpoint(url)


# Requests.


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_save_is_its_parts_and_a_constant_and_a_load_lists_nothing(
    s3_proxy: FaultyProxy, ranks: int
) -> None:
    store = ObjectStore(new_url(), options=options_for(s3_proxy.port))

    def save(group: Group) -> None:
        megackpt.save(state(group.rank, ranks, seed=1), store, group=group)

    def load(group: Group) -> None:
        loaded = megackpt.load(state(group.rank, ranks), store, group=group)
        assert is_loaded(loaded, 1, group.rank, ranks)

    with s3_proxy.counting() as asked:
        SimulatedWorld(ranks).run(save)
    # A header makes the last part of each rank; what is put are index, common state and commit.
    parts = ranks * (8 // ranks + 1)
    assert asked == {"begin": ranks, "part": parts, "complete": ranks, "put": 3, "list": 4}
    last = [request for request in s3_proxy.asked if request.kind in ("put", "complete")][-1]
    assert last.path.endswith("/metadata.json")
    with s3_proxy.counting() as asked:
        SimulatedWorld(ranks).run(load)
    print(f"{ranks} ranks load with {asked}")
    assert set(asked) == {"head", "get"}
    assert asked["head"] == ranks
    assert asked["get"] <= 5 * ranks


def test_a_root_is_scanned_by_one_listing_and_a_request_a_step(s3_proxy: FaultyProxy) -> None:
    with Checkpointer(new_url(), objects=options_for(s3_proxy.port), group=SingleProcess()) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"a": step})
        with s3_proxy.counting() as asked:
            assert checkpointer.steps() == (1, 2, 3)
    assert asked == {"list": 1, "head": 3}
    (listing,) = [request.path for request in s3_proxy.asked if request.kind == "list"][-1:]
    assert "delimiter" in listing  # the steps, and not what is in them


# Steps.


def test_steps_are_found_kept_removed_and_incomplete_ones_cleaned(s3_server: S3Server) -> None:
    url, options = new_url(), options_for(s3_server.port)
    with Checkpointer(f"{url}/", keep_last=2, objects=options, group=SingleProcess()) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(NotACheckpointError, match=f"{url} has no committed step"):
            checkpointer.load({"value": None})
        for step in (1, 2, 3):
            checkpointer.save(step, {"value": step}, content_metadata={"of": step})
        everything = ObjectStore(url, options=options)
        everything.delete([n for n in everything.names() if n.endswith("3/metadata.json")])
        everything.write("iter_0000000/of_others.pt", b"1")
        everything.write("iter_00000004/metadata.json", b"{}")
        assert checkpointer.scan().committed == (2,)
        assert checkpointer.scan().incomplete == (3,)
        assert checkpointer.load({})["value"] == 2
        assert checkpointer.content_metadata(2) == {"of": 2}
        with pytest.raises(NotACheckpointError, match=f"{url}/iter_0000003 is not a checkpoint"):
            checkpointer.load({}, step=3)
        checkpointer.save(4, {"value": 4})
        assert checkpointer.scan().incomplete == ()
        assert checkpointer.steps() == (2, 4)
        assert everything.names("iter_0000000/") == ["iter_0000000/of_others.pt"]
        assert everything.names("iter_0000003/") == []
        assert checkpointer.location(4) == f"{url}/iter_0000004"
        with pytest.raises(UnsupportedError, match=r"not on a file system.*Use location\(4\)"):
            checkpointer.directory(4)


def test_pins_metrics_and_the_tracker_are_next_to_the_steps(s3_proxy: FaultyProxy) -> None:
    url, options = new_url(), options_for(s3_proxy.port)
    everything = ObjectStore(url, options=options)

    def run(step: int, loss: float) -> Checkpointer:
        checkpointer = Checkpointer(
            url,
            retention=Retention(keep_last=1, keep_best=KeepBest(metric="loss")),
            verify_after_save=True,
            objects=options,
            group=SingleProcess(),
        )
        checkpointer.save(step, {"value": step}, metrics={"loss": loss})
        return checkpointer

    run(1, 9.0).pin(1)
    run(2, 1.0)
    run(3, 5.0)
    with s3_proxy.counting() as asked:
        checkpointer = run(4, 6.0)
    print(f"a save that removes one of four steps asks {asked}")
    assert checkpointer.steps() == (1, 2, 4)
    assert checkpointer.pins() == (1,)
    assert checkpointer.metrics(2) == {"loss": 1.0}
    assert everything.read("latest_checkpointed_iteration.txt", max_bytes=100) == b"4"
    sibling = [name for name in everything.names() if not name.startswith("iter_")]
    assert sibling == [
        *(f".megackpt/metrics/iter_000000{step}.json" for step in (1, 2, 4)),
        ".megackpt/pins/iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]
    everything.write("latest_checkpointed_iteration.txt", b"900")
    assert checkpointer.load({}, "latest") == {"value": 4}
    checkpointer.unpin(1)
    s3_proxy.choose = lambda kind, path: "403" if kind == "put" and path.endswith("txt") else ""
    checkpointer.save(5, {"value": 5})  # what only follows the commit does not fail it
    assert checkpointer.load({}) == {"value": 5}


def test_training_survives_a_store_that_rejects_writes(
    s3_proxy: FaultyProxy, caplog: pytest.LogCaptureFixture
) -> None:
    options = options_for(s3_proxy.port, max_retries=1)
    with Checkpointer(
        new_url(), keep_last=1, on_error="warn", objects=options, group=SingleProcess()
    ) as checkpointer:
        assert checkpointer.save(1, state(seed=1), metrics={"loss": 1.0})
        s3_proxy.choose = lambda kind, path: "503" if kind in ("part", "complete") else ""
        assert not checkpointer.save(2, state(seed=2), metrics={"loss": 2.0})
        assert checkpointer.failed_saves == 1
        assert "the server answered 503" in caplog.text
        everything = ObjectStore(checkpointer.location(1).rpartition("/")[0], options=options)
        assert not [name for name in everything.names() if "iter_0000002" in name]
        s3_proxy.choose = lambda kind, path: ""
        assert is_loaded(checkpointer.load(state()), seed=1)
        assert checkpointer.save(3, state(seed=3))
        assert checkpointer.scan() == StepList((3,), ())


def test_a_removal_that_breaks_off_leaves_no_half_of_a_step(s3_proxy: FaultyProxy) -> None:
    options = options_for(s3_proxy.port)
    with Checkpointer(new_url(), keep_last=2, objects=options, group=SingleProcess()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": step})
        deleted = itertools.count()
        s3_proxy.choose = lambda kind, path: "403" if kind == "delete" and next(deleted) > 1 else ""
        checkpointer.save(3, {"a": 3})
        assert next(deleted) == 3  # metrics of an earlier save of step 3, the commit of step 1, and its files
        s3_proxy.choose = lambda kind, path: ""
        assert checkpointer.scan().committed == (2, 3)
        assert checkpointer.scan().incomplete == (1,)
        checkpointer.save(4, {"a": 4})
        assert checkpointer.scan() == StepList((3, 4), ())


def test_an_asynchronous_save_goes_on_behind(s3_server: S3Server) -> None:
    options = options_for(s3_server.port)
    with Checkpointer(new_url(), async_save=True, objects=options, group=SingleProcess()) as checkpointer:
        saved = state(seed=5)
        checkpointer.save(1, saved)
        saved["w"].data.zero_()
        checkpointer.wait()
        assert is_loaded(checkpointer.load(state()), seed=5)


@sampled(4)
@pytest.mark.parametrize("to", ["torch_dist", "zarr"])
def test_other_formats_are_written_and_read_there(s3_server: S3Server, to: str) -> None:
    source, target = MemoryStore(), ObjectStore(new_url(), options=options_for(s3_server.port))
    save_alone(source, seed=6)
    megackpt.convert(source, target, to, group=SingleProcess())
    assert holds(target, seed=6)


# Faults.


def _save_steps(url: str, options: ObjectOptions) -> list[bool]:
    results = []
    with Checkpointer(url, keep_last=2, objects=options) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, own_state(seed=step))
            results.append(is_own_loaded(checkpointer.load(own_state(axis=1)), step, axis=1))
        results.append(checkpointer.steps() == (3, 4))
    return results


def test_with_one_request_in_twenty_spoiled_nothing_is_lost(rank_pool: RankPool, s3_server: S3Server) -> None:
    s3_proxy = FaultyProxy(s3_server, stall_s=4)  # for longer than the client waits
    chance, kinds = random.Random(20), itertools.cycle(FAULTS)
    s3_proxy.choose = lambda kind, path: next(kinds) if chance.random() < 0.05 else ""
    url = new_url()
    options = options_for(s3_proxy.port, part_bytes=32 << 10, timeout_s=2)
    assert rank_pool.run(_save_steps, 2, url, options) == [[True] * 5] * 2
    asked, spoiled = s3_proxy.counts(), Counter(request.fault for request in s3_proxy.asked if request.fault)
    print(f"{sum(asked.values())} requests {asked}, of which were spoiled {dict(spoiled)}")
    assert sum(spoiled.values()) >= 15
    assert set(spoiled) == set(FAULTS)
    s3_proxy.choose = lambda kind, path: ""
    store = ObjectStore(url, options=options)
    left = {name.partition("/")[0] for name in store.names()}
    assert left == {"iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"}
    s3_proxy.close()


def _failing_save(url: str, options: ObjectOptions) -> str:
    with pytest.raises(StorageError) as caught:
        megackpt.save(own_state(seed=2), ObjectStore(url, options=options))
    return str(caught.value)


def test_a_save_that_the_store_rejects_leaves_the_previous_one(
    rank_pool: RankPool, s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    url, options = new_url(), options_for(s3_proxy.port, max_retries=1)
    store = ObjectStore(url, options=options)
    save_alone(store, seed=1)
    before = store.names()
    s3_proxy.choose = lambda kind, path: "503" if kind == "complete" else ""
    texts = rank_pool.run(_failing_save, 2, url, options)
    assert texts[0] == texts[1]
    assert "cannot write: the server answered 503" in texts[0]
    assert store.names() == before
    assert unfinished_uploads(s3_server.port, url) == []
    assert holds(store, seed=1)


def _die_uploading(url: str, options: ObjectOptions, port: int) -> None:
    def die(operation: Operation) -> None:
        while dist.get_rank() == 1:
            if any(key.endswith(operation.name) for key in unfinished_uploads(port, url)):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    store = FaultyStore(ObjectStore(url, options=options), fail_at=0, kinds={"writer.close"}, hook=die)
    megackpt.save(own_state(seed=2), store)


def test_a_rank_that_is_killed_while_it_uploads_leaves_the_previous_checkpoint(
    rank_pool: RankPool, s3_server: S3Server
) -> None:
    url, options = new_url(), options_for(s3_server.port)
    store = ObjectStore(url, options=options)
    save_alone(store, seed=1)
    died, survived = rank_pool.outcomes(_die_uploading, 2, url, options, s3_server.port)[::-1]
    assert isinstance(died.error, EOFError)
    assert survived.error is not None
    assert holds(store, seed=1)
    # Nobody but a lifecycle rule of the bucket can tell the parts of the dead from those of the living.
    assert len(unfinished_uploads(s3_server.port, url)) == 1
    save_alone(store, seed=3)
    assert holds(store, seed=3)
    assert len(store.names("data/")) == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("megackpt-upload")]


def test_parity_and_repair_work_in_an_object_store(s3_server: S3Server) -> None:
    store = ObjectStore(new_url(), options=options_for(s3_server.port))

    def save_rank(group: Group) -> None:
        options = megackpt.SaveOptions(parity=4)
        megackpt.save(state(group.rank, 4, seed=1), store, options=options, group=group)

    SimulatedWorld(4).run(save_rank)
    names = store.names()
    lost = next(name for name in names if name.startswith("data/"))
    store.delete([lost])
    fallback = megackpt.LoadOptions(on_corrupt="fallback")
    loaded, report = megackpt.load_with_report(state(), store, options=fallback)
    assert is_loaded(loaded, seed=1)
    assert {m.file for m in report.recovered} == {lost}
    repaired = megackpt.repair(store)
    assert (repaired.is_applied, repaired.is_whole) == (True, True)
    assert store.names() == names
    store.close()
