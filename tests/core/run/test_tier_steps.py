"""Tiers in a simulated world: where steps are, what is loaded when nodes are lost, invalid arguments."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    Checkpointer,
    DeclarationError,
    LoadOptions,
    LocalTier,
    MemoryTier,
    NotACheckpointError,
    ShardedObject,
    ShardedTensor,
    StorageError,
    Tiers,
)
from megackpt.cli.run_steps import list_steps
from megackpt.comm import Group
from megackpt.engine.checkpoint.step_roots import LocalSteps
from megackpt.engine.tiers import transfer as tier_transfer
from megackpt.plans.planning.redundancy import Nodes
from megackpt.run.checkpointer import LastLoad, Tier
from megackpt.run.checkpointer.tiers import TierSet
from megackpt.storage import LocalStore, Store
from megackpt.testing.faulty_store import FaultyStore, Operation
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import data_files, flip
from tests.support.effort import few

DATA = 4096  # where data begins in a small data file


def state(group: Group, step: int, tp: int) -> dict[str, Any]:
    """A weight in columns, replicated over the rest; an optimizer's share of each rank; an object of each."""
    rank, size = group.rank, group.size
    weight = (torch.arange(32 * 24.0).reshape(32, 24) + step).chunk(tp, dim=1)[rank % tp]
    share = (torch.arange(48_000.0) * step).chunk(size)[rank]
    return {
        "weight": ShardedTensor.from_rank_offsets(
            "weight", weight.contiguous(), (1, rank % tp, tp), replica_id=rank // tp
        ),
        "share": ShardedTensor.from_rank_offsets("share", share.clone(), (0, rank, size)),
        "rng": ShardedObject("rng", [rank, step], (8,), (rank,)) if size == 8 else None,
        "step": step,
    }


class Run:
    """A run whose nodes are directories; a fresh world, and fresh objects, at each call."""

    def __init__(
        self,
        base: Path,
        *,
        per_node: int = 2,
        tiers: Sequence[Tier] = (),
        root_every: int = 100,
        **options: Any,
    ) -> None:
        self.base = base
        self.tiers = tiers or [MemoryTier(f"{base}/node-{{node}}/memory")]
        self.root_every = root_every
        self.options = options
        self.per_node = per_node

    def tiers_of(self, *, node: int) -> Tiers:
        return Tiers(self.tiers, root_every=self.root_every, node=node)

    def checkpointer(self, group: Group, nodes: Sequence[int]) -> Checkpointer:
        tiers = self.tiers_of(node=nodes[group.rank // self.per_node])
        return Checkpointer(self.base / "root", tiers=tiers, group=group, **self.options)

    def save(self, *steps: int, nodes: Sequence[int] = range(4), to_root: bool | None = None) -> None:
        def act(group: Group) -> None:
            with self.checkpointer(group, nodes) as checkpointer:
                for step in steps:
                    checkpointer.save(step, state(group, step, tp=2), to_root=to_root)

        SimulatedWorld(self.per_node * len(nodes)).run(act)

    def load(self, *, nodes: Sequence[int] = range(4), tp: int = 2, step: int | None = None) -> LastLoad:
        """Load at a layout, compare with what was saved, and return what was used."""

        def act(group: Group) -> LastLoad:
            checkpointer = self.checkpointer(group, nodes)
            asked = state(group, 0, tp)
            loaded = checkpointer.load(asked, step=step)
            assert checkpointer.last_load is not None
            expected = state(group, checkpointer.last_load.step, tp)
            for key in ("weight", "share"):
                assert torch.equal(loaded[key], expected[key].data), key
            assert loaded["step"] == expected["step"]
            if group.size == 8:
                assert loaded["rng"] == expected["rng"].data
            return checkpointer.last_load

        results = SimulatedWorld(self.per_node * len(nodes)).run(act)
        assert all(result == results[0] for result in results)
        return results[0]

    def node(self, node: int, tier: str = "memory") -> Path:
        return self.base / f"node-{node}" / tier

    def lose(self, *nodes: int) -> None:
        for node in nodes:
            shutil.rmtree(self.base / f"node-{node}")

    def kept(self, node: int, tier: str = "memory") -> list[str]:
        return sorted(path.name for path in self.node(node, tier).iterdir())


def test_each_byte_is_on_replication_factor_nodes_and_old_steps_are_removed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_transfer, "PART_BYTES", 1000)
    run = Run(memory_path)
    run.save(1, 2, 3)
    owners: dict[str, list[int]] = {}
    contents: dict[str, bytes] = {}
    for node in range(4):
        assert run.kept(node) == ["iter_0000002", "iter_0000003"]
        for file in data_files(run.node(node) / "iter_0000003"):
            assert file.read_bytes() == contents.setdefault(file.name, file.read_bytes())
            owners.setdefault(file.name[-17:-12], []).append(node)
    assert owners == {f"{r:05d}": sorted([r // 2, (r // 2 + 1) % 4]) for r in range(8)}
    assert not (memory_path / "root").exists()


def test_tiers_and_root_have_intervals_of_their_own_and_the_newest_step_of_all_wins(
    memory_path: Path,
) -> None:
    tiers = [
        MemoryTier(f"{memory_path}/node-{{node}}/memory", keep_last=1),
        LocalTier(f"{memory_path}/node-{{node}}/disk", every=2, jump=2),
    ]
    run = Run(memory_path, tiers=tiers, root_every=4)
    run.save(4, 5, 6, 7)
    assert run.kept(1) == ["iter_0000007"]
    assert run.kept(1, "disk") == ["iter_0000004", "iter_0000006"]
    assert Checkpointer(memory_path / "root").steps() == (4,)
    assert (run.load().step, run.load(step=6).where) == (7, f"the local disk tier {tiers[1].path}")
    for node in range(4):
        shutil.rmtree(run.node(node))
    assert run.load().step == 6
    run.lose(0, 1)  # two nodes further is the copy
    assert run.load().step == 6
    run.lose(*range(4))
    used = run.load()
    assert (used.step, used.where) == (4, str(memory_path / "root"))


@pytest.mark.parametrize("lost", [(0,), (3,), (0, 2)])
def test_other_layouts_and_fewer_nodes_take_the_newest_step_from_the_nodes_that_are_left(
    memory_path: Path, lost: tuple[int, ...]
) -> None:
    run = Run(memory_path)
    run.save(1, 2)
    run.lose(*lost)
    left = [node for node in range(4) if node not in lost]
    used = run.load(nodes=left, tp=1)
    assert (used.step, used.skipped) == (2, ())
    assert run.load(nodes=[*left, *lost], tp=4).step == 2  # empty nodes come instead


def test_if_two_neighbours_are_lost_the_root_is_loaded_with_a_warning(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(memory_path)
    run.save(1, to_root=True)
    run.save(2, 3)
    run.lose(1, 2)
    with caplog.at_level(logging.WARNING):
        used = run.load()
    assert (used.step, used.where) == (1, str(memory_path / "root"))
    assert [passed.step for passed in used.skipped] == [3, 2]
    assert "2 of its 8 data files are on no node any more" in used.skipped[0].why
    assert "Not loaded: step 3 in the memory tier" in caplog.text
    assert f"Step 1 was loaded from {memory_path / 'root'}" in caplog.text
    assert all(run.kept(node) == [] for node in (0, 3))  # of no use, and of much memory
    run.save(2)
    assert run.load().step == 2


def test_if_no_step_is_left_the_error_names_the_skipped_steps(memory_path: Path) -> None:
    run = Run(memory_path)
    with pytest.raises(NotACheckpointError, match="no committed step that is complete"):
        run.load()
    run.save(1)
    run.lose(0, 1)
    with pytest.raises(NotACheckpointError, match=r"(?s)Skipped:.*step 1 in the memory tier"):
        run.load()
    with pytest.raises(NotACheckpointError, match="no committed step 7"):
        run.load(step=7)


def test_a_step_that_no_node_has_committed_is_never_loaded_and_is_removed(memory_path: Path) -> None:
    run = Run(memory_path)
    run.save(1, 2, 3)
    for node in range(4):
        (run.node(node) / "iter_0000003" / "metadata.json").unlink()
        if node:  # killed while the nodes commit: one of them has
            (run.node(node) / "iter_0000002" / "metadata.json").unlink()
    assert [(s.step, s.state) for s in list_steps(run.node(0))] == [(2, "damaged"), (3, "incomplete")]
    assert run.load().step == 2
    assert [run.kept(node) for node in range(4)] == [["iter_0000002"]] * 4
    (step,) = list_steps(run.node(3))
    assert step.damage.endswith("is missing (a tier has only the files of its node)")


def test_a_tier_or_a_root_that_cannot_be_listed_is_a_warning(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(memory_path)
    run.save(1)
    names = LocalSteps.names

    def names_or_error(local_steps: LocalSteps) -> list[str]:
        if local_steps.location.endswith("root") or "/node-2/" in local_steps.location:
            raise PermissionError(13, "Permission denied", local_steps.location)
        return names(local_steps)

    monkeypatch.setattr(LocalSteps, "names", names_or_error)
    with caplog.at_level(logging.WARNING):
        assert run.load().step == 1
    assert f"{memory_path / 'root'} cannot be listed, so only the tiers are searched" in caplog.text
    assert f"{run.node(2)} cannot be listed, so nothing is loaded from it" in caplog.text


def test_stored_keys_may_be_renamed_where_ranks_read_for_each_other(memory_path: Path) -> None:
    options = LoadOptions(rename={"weight": "weight", "share": "part", "rng": "rng"})
    run = Run(memory_path, load_options=options)
    run.save(1)

    def load_part(group: Group) -> float:
        part = ShardedTensor.from_rank_offsets("part", torch.zeros(48_000))
        loaded = run.checkpointer(group, range(4)).load({"part": part})
        return float(loaded["part"].sum())

    assert SimulatedWorld(8).run(load_part) == [float(torch.arange(48_000.0).sum())] * 8


def test_a_damaged_copy_is_not_used_and_the_other_one_is_read(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(memory_path)
    run.save(1, 2)
    damaged = run.node(1) / "iter_0000002" / "data"
    name = next(path.name for path in damaged.iterdir() if path.name.endswith("-00001.safetensors"))
    for node in (0, 1):  # and of another file the only other copy
        flip(run.node(node) / "iter_0000002" / "data" / name.replace("-00001", f"-0000{node}"), DATA)
    with caplog.at_level(logging.WARNING):
        used = run.load()
    assert (used.step, used.skipped) == (2, ())
    assert len(used.damaged) == 2
    assert f"node 1: iter_0000002/data/{name}" in used.damaged
    assert f"node 1: iter_0000002/data/{name}" in caplog.text
    flip(run.node(0) / "iter_0000002" / "data" / name, DATA)
    used = run.load()
    assert (used.step, [passed.step for passed in used.skipped]) == (1, [2])


@pytest.mark.parametrize("name", ["index", "common", "metadata.json"])
def test_a_damaged_index_or_commit_of_one_node_is_replaced_by_that_of_another(
    memory_path: Path, name: str
) -> None:
    run = Run(memory_path)
    run.save(1)
    file = next(p for p in (run.node(0) / "iter_0000001").iterdir() if p.name.startswith(name))
    whole = file.read_bytes()
    flip(file, len(whole) // 2)
    assert run.load().step == 1
    assert file.read_bytes() == whole
    flip(file, len(whole) // 2)
    results = SimulatedWorld(8).run(lambda group: run.checkpointer(group, range(4)).find_latest())
    assert results == [1] * 8
    assert run.load().step == 1
    assert file.read_bytes() == whole


def test_a_damaged_step_of_the_root_is_skipped_too(memory_path: Path) -> None:
    run = Run(memory_path, tiers=[MemoryTier(f"{memory_path}/node-{{node}}/memory", every=2)])
    run.save(2)
    run.save(3, to_root=True)
    flip(data_files(memory_path / "root" / "iter_0000003")[3], DATA)
    used = run.load()
    assert (used.step, used.skipped[0].step) == (2, 3)
    assert "digest differs" in used.skipped[0].why


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Lets stores of tiers fail where `strike` is true of the store's location and the operation."""
    acts: dict[str, Any] = {"strike": None}
    open_well = LocalSteps.open

    def open_to_fail(local_steps: LocalSteps, name: str) -> Store:
        store = open_well(local_steps, name)
        strike = acts["strike"]
        if strike is None or not isinstance(store, LocalStore) or "/node-" not in store.location:
            return store
        return FaultyStore(store, fail_at=lambda operation: strike(store.location, operation))

    monkeypatch.setattr(LocalSteps, "open", open_to_fail)
    return acts


COPY = "00003.safetensors"  # of what a rank of node 1 has written


@pytest.mark.parametrize(
    ("kind", "name"),
    [("create", ""), ("writer.write", "00004.safetensors"), ("open_writer", COPY), ("writer.write", COPY),
     ("writer.close", "index"), ("replace", "")],
)  # fmt: skip
def test_a_full_tier_is_a_warning_and_the_root_still_gets_its_step(
    memory_path: Path, stores: dict[str, Any], kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    def strike(location: str, operation: Operation) -> bool:
        return "/node-2/" in location and operation.kind == kind and name in operation.name

    run = Run(memory_path)
    run.save(1)
    stores["strike"] = strike
    caplog.set_level(logging.WARNING, logger="megackpt.run.checkpointer")
    run.save(2, to_root=True)
    assert "Step 2 is not in the memory tier" in caplog.text
    assert "No space left" in caplog.text
    assert (memory_path / "root" / "iter_0000002" / "metadata.json").exists()
    stores["strike"] = None
    if kind != "replace":  # there other nodes have committed a step whose data is whole
        assert not list(memory_path.glob("node-*/memory/iter_0000002/*/*"))
    run.save(3)
    assert all("iter_0000003" in run.kept(node) for node in range(4))
    assert run.load().step == 3


def test_a_step_older_than_what_a_tier_has_is_saved_with_a_warning_and_loaded(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(memory_path)
    run.save(4)
    with caplog.at_level(logging.WARNING):
        run.save(3)
    assert f"Step 3 continues no step and leaves these steps of {memory_path}/root behind: 4" in caplog.text
    assert run.load().step == 3
    run.save(4, 5, 6)
    assert run.kept(0) == ["iter_0000005", "iter_0000006"]


class Killed(BaseException):
    """The process is no more."""


def test_a_job_killed_at_any_operation_of_a_save_has_the_old_step_or_the_new_one_without_any_node(
    memory_path: Path, stores: dict[str, Any]
) -> None:
    step = few(3, of=1)  # so many operations lie between one kill and the next
    seen = []
    while len(seen) < 3 or seen[-2] == 1 or seen[-1] == 1:  # until two saves in a row have got through
        run = Run(memory_path / str(len(seen)), per_node=1)
        run.tiers = [MemoryTier(f"{run.base}/node-{{node}}/memory", keep_last=1)]
        stores["strike"] = None
        run.save(1, nodes=range(2))
        left = iter(range(len(seen) * step, -1, -1))

        def strike(location: str, operation: Operation, left: Iterator[int] = left) -> bool:
            if not next(left, 0):  # and whatever another process is about to do is not done either
                raise Killed
            return False

        stores["strike"] = strike
        with contextlib.suppress(Killed):
            run.save(2, nodes=range(2))
        stores["strike"] = None
        run.lose(len(seen) % 2)  # so that what the other one says it has must be all there is
        used = run.load(nodes=range(2))
        assert used.step in (1, 2)
        assert used.skipped == ()
        seen.append(used.step)
        run.save(3, nodes=range(2))
        assert [run.kept(n) for n in range(2)] == [["iter_0000003"]] * 2
        assert len(data_files(run.node(0) / "iter_0000003")) == 2
    assert len(seen) * step > 20


def test_copies_go_to_other_nodes_whatever_their_number_and_the_jump() -> None:
    for count in range(1, 6):
        nodes = Nodes(tuple(rank // 2 for rank in range(2 * count)))
        for copies in range(1, 5):
            for jump in range(1, 7):
                for rank, keepers in enumerate(nodes.keepers(copies=copies, jump=jump)):
                    nodes_with_copies = [nodes.of_rank[rank], *(nodes.of_rank[keeper] for keeper in keepers)]
                    assert len(set(nodes_with_copies)) == len(nodes_with_copies) == min(copies, count)
    assert Nodes((0, 0, 1, 1, 2, 2, 3, 3)).keepers(copies=2, jump=2)[:3] == ((4,), (5,), (6,))
    assert Nodes(tuple(range(5))).keepers(copies=3, jump=2)[0] == (2, 4)


def test_ranks_share_a_node_by_local_world_size_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, memory_path: Path
) -> None:
    def nodes_of(group: Any) -> tuple[int, ...]:
        return TierSet(Tiers([LocalTier(f"{memory_path}/{{node}}")])).open(group).nodes.of_rank

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert SimulatedWorld(4).run(nodes_of) == [(0, 0, 1, 1)] * 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert SimulatedWorld(2).run(nodes_of) == [(0, 0)] * 2


def test_invalid_tiers_are_errors(memory_path: Path) -> None:
    with pytest.raises(DeclarationError, match="MemoryTier: keep_last is 0"):
        MemoryTier(memory_path, keep_last=0)
    tiers = [MemoryTier(memory_path / "a"), LocalTier(memory_path / "b/../a")]
    with pytest.raises(DeclarationError, match="Two tiers are in"):
        Checkpointer(memory_path / "root", tiers=tiers)
    with pytest.raises(DeclarationError, match=r"Tiers\.root_every is 0"):
        Tiers(root_every=0)
    shared = Run(memory_path, tiers=[MemoryTier(memory_path / "shared")])
    with pytest.raises(DeclarationError, match=r"different nodes, '0' and '1'.*the same directory"):
        shared.save(1)


@pytest.mark.parametrize("way", ["broadcast", "copy"])
def test_files_that_a_node_could_not_read_are_on_no_other_node(memory_path: Path, way: str) -> None:
    """The ranks that receive them have been sent bytes, but not those of the files."""

    def run(group: Group) -> None:
        store = stores[group.rank]
        store.create()
        if group.rank == 0:
            store.write("good", b"good")
        files = [("good", 4), ("lost", 4)]
        if way == "broadcast":
            takes = {name for name, _ in files} if group.rank else set()
            tier_transfer.broadcast_files(
                group, files, source=0, read_from=store, write_to=store, takes=takes, doing="copying"
            )
        else:
            tier_transfer.copy_files(group, {0: files, 1: []}, [[1], [0]], store, doing="copying")

    stores = [LocalStore(memory_path / str(rank)) for rank in range(2)]
    for error in SimulatedWorld(2).outcomes(run):
        assert isinstance(error, StorageError)
        assert error.rank == 0
    assert [store.names() for store in stores] == [["good"], []]
