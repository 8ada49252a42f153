"""Loads of damaged checkpoints with on_corrupt="fallback": what is taken from where, and what is said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

from megackpt import (
    Checkpointer,
    CheckpointError,
    DeclarationError,
    IntegrityError,
    LoadOptions,
    LoadReport,
    NotACheckpointError,
    Policy,
    SaveOptions,
    ShardedObject,
    StorageError,
    inspect,
    load,
    load_with_report,
    save,
    verify,
)
from megackpt.comm import Group
from megackpt.contrib.dcp import MegackptStorageReader, MegackptStorageWriter
from megackpt.errors import UnsupportedError
from megackpt.plans.metadata import DIGEST_BLOCK_BYTES
from megackpt.run import remove_sharded_tensors
from megackpt.storage import MemoryStore
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import data_files, flip
from tests.support.dcp_alone import two_that_look_like_one_save
from tests.support.states import sharded
from tests.support.worlds import loading, saving

RANKS = 3
LONG = 200_000
FALLBACK = LoadOptions(on_corrupt="fallback")


def state(rank: int, *, value: float | None = 1.0) -> dict[str, object]:
    """Rows of several blocks on each rank, a small array and an object on the first; None for empty ones."""
    rows = torch.zeros(LONG) if value is None else torch.arange(float(LONG)) * (rank + value)
    small = torch.full((3,), value or 0.0)
    return {
        "rows": sharded("rows", rows, (0, rank, RANKS)),
        "small": sharded("small", small, replica_id=rank),
        "o": ShardedObject("o", None if value is None else {"v": value}, (1,), (0,), replica_id=rank),
        "step": 7,
    }


empty = partial(state, value=None)


def saved(location: Any, options: SaveOptions | None = None, *, value: float = 1.0) -> Any:
    SimulatedWorld(RANKS).run(saving(partial(state, value=value), location, options=options))
    return location


def asked() -> dict[str, object]:
    whole = sharded("rows", torch.zeros(RANKS * LONG))
    return state(0, value=None) | {"rows": whole}


def read(location: Any, options: LoadOptions = FALLBACK) -> LoadReport:
    """Load everything, compare it with what was saved, and return the report."""
    loaded, report = load_with_report(asked(), location, options=options)
    expected = torch.cat([torch.arange(float(LONG)) * (rank + 1) for rank in range(RANKS)])
    assert torch.equal(loaded["rows"], expected)
    assert torch.equal(loaded["small"], torch.ones(3))
    assert (loaded["o"], loaded["step"]) == ({"v": 1.0}, 7)
    return report


def copy_of(directory: Path) -> Path:
    copy = directory.parent / f"{directory.name}-copy"
    shutil.copytree(directory, copy)
    return copy


def test_the_report_lists_what_parity_recovered_block_by_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = data_files(saved(tmp_path, SaveOptions(parity=2)))[1]
    flip(file, 4096 + 5)
    (record,) = read(tmp_path).recovered
    assert (record.key, record.box, record.source) == ("rows", f"[{LONG}:{2 * LONG}]", "parity")
    assert (record.file, record.start, record.stop) == (f"data/{file.name}", 4096, 4096 + DIGEST_BLOCK_BYTES)
    assert "digest differs" in record.why
    assert f"bytes 4096:266240 of data/{file.name}, 'rows'" in caplog.text
    with pytest.raises(IntegrityError):
        load(asked(), tmp_path)  # nothing was changed, and nothing falls back by itself


def test_parity_is_asked_before_copies_and_copies_in_their_order(tmp_path: Path) -> None:
    saved(tmp_path / "it", SaveOptions(parity=3))
    first, second = copy_of(tmp_path / "it"), tmp_path / "second"
    shutil.copytree(first, second)
    options = LoadOptions(on_corrupt="fallback", copies=(str(first), second))
    files = data_files(tmp_path / "it")
    files[0].unlink()
    assert {m.source for m in read(tmp_path / "it", options).recovered} == {"parity"}
    files[1].unlink()
    assert {m.source for m in read(tmp_path / "it", options).recovered} == {str(first)}
    data_files(first)[1].unlink()  # its own parity has what it has lost
    sources = {m.file: m.source for m in read(tmp_path / "it", options).recovered}
    assert sources == {f"data/{files[0].name}": str(first), f"data/{files[1].name}": f"parity of {first}"}
    shutil.rmtree(first / "parity")
    sources = {m.file: m.source for m in read(tmp_path / "it", options).recovered}
    assert sources[f"data/{files[1].name}"] == str(second)


def lose_index(directory: Path) -> None:
    next(directory.glob("index-*")).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "lose_index": lose_index,
    "lose_commit": lambda directory: (directory / "metadata.json").unlink(),
    "spoil_common": lambda directory: flip(next(directory.glob("common-*.json")), 30),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_replaces_small_files(damage: str, tmp_path: Path) -> None:
    copy = copy_of(saved(tmp_path / "it"))
    DAMAGES[damage](tmp_path / "it")
    report = read(tmp_path / "it", LoadOptions(on_corrupt="fallback", copies=(copy,)))
    assert [m.source for m in report.recovered] == [str(copy)]
    with pytest.raises(CheckpointError):
        read(tmp_path / "it")


def test_a_copy_of_another_save_is_not_used_and_the_error_names_all_that_were_tried(tmp_path: Path) -> None:
    saved(tmp_path / "it", SaveOptions(parity=3))
    other = saved(tmp_path / "other", value=5.0)
    for file in data_files(tmp_path / "it")[:2]:
        file.unlink()
    options = LoadOptions(on_corrupt="fallback", copies=(other, tmp_path / "nowhere"))
    with pytest.raises(StorageError) as caught:
        read(tmp_path / "it", options)
    text = str(caught.value)
    assert "No other source could replace it:" in text
    assert "  parity: " in text
    assert f"  {other} holds another save" in text
    assert f"  {tmp_path / 'nowhere'}: " in text


def test_a_copy_of_another_save_does_not_replace_a_lost_index(tmp_path: Path) -> None:
    lose_index(saved(tmp_path / "it"))
    other = saved(tmp_path / "other", value=5.0)
    with pytest.raises(StorageError, match=f"{other} holds another save"):
        read(tmp_path / "it", LoadOptions(on_corrupt="fallback", copies=(other,)))


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_what_another_library_has_saved_is_never_mixed_with_a_copy(tmp_path: Path) -> None:
    """Nothing in it says which save it is of: a copy could be of another step."""
    first, second = two_that_look_like_one_save(tmp_path)
    wanted = {"w": sharded("w", torch.zeros(4))}
    options = LoadOptions(on_corrupt="fallback", copies=(second,))
    with pytest.raises(CheckpointError, match="nothing in its format says whether it is of the same save"):
        load(wanted, first, options=options)


def test_a_second_damage_at_the_same_position_is_an_error_and_not_a_value(tmp_path: Path) -> None:
    first, second, _ = data_files(saved(tmp_path, SaveOptions(parity=3)))
    flip(first, 5000)
    flip(second, 6000)
    with pytest.raises(IntegrityError, match="parity: 'rows'"):
        read(tmp_path)
    shutil.copy(tmp_path / "data" / first.name, tmp_path / "keep")
    flip(first, 5000)
    flip(first, 500_000)  # another block
    assert len(read(tmp_path).recovered) == 2


def test_without_any_source_the_error_names_none(tmp_path: Path) -> None:
    flip(data_files(saved(tmp_path))[0], -1)
    with pytest.raises(IntegrityError, match="saved without parity, and no copies were given"):
        read(tmp_path)
    with pytest.raises(NotACheckpointError, match="nothing was saved there"):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("exchange", ["direct", "all_to_all", "two_stage"])
def test_ranks_that_exchange_fall_back_as_well(exchange: Any, tmp_path: Path) -> None:
    for file in data_files(saved(tmp_path, SaveOptions(parity=1)))[:2]:
        flip(file, 5000)
    options = LoadOptions(on_corrupt="fallback", exchange=exchange)

    loaded = SimulatedWorld(RANKS).run(loading(empty, tmp_path, options=options))
    assert [float(of_rank["rows"][1]) for of_rank in loaded] == [1.0, 2.0, 3.0]


def test_a_load_without_damage_opens_no_source_and_sends_no_more_messages(tmp_path: Path) -> None:
    saved(tmp_path, SaveOptions(parity=3))
    messages = []
    for options in (LoadOptions(), LoadOptions(on_corrupt="fallback", copies=("s3x://nowhere",))):
        world = SimulatedWorld(RANKS)
        world.run(loading(empty, tmp_path, options=options))
        messages.append(world.messages)
    assert messages[0] == messages[1]


@pytest.mark.parametrize("format", [("torch_dist", 1), ("zarr", 3)], ids=str)
def test_other_formats_fall_back_to_copies_and_reject_parity(format: tuple[str, int], tmp_path: Path) -> None:
    if format[0] == "zarr":
        pytest.importorskip("tensorstore")
    single = {"w": sharded("w", torch.arange(1000.0))}
    save(single, tmp_path / "it", format)
    copy = copy_of(tmp_path / "it")
    (file,) = inspect(tmp_path / "it").files
    (tmp_path / "it" / file.name).unlink()
    wanted = {"w": sharded("w", torch.zeros(1000))}
    options = LoadOptions(on_corrupt="fallback", copies=(copy,))
    loaded, report = load_with_report(wanted, tmp_path / "it", options=options)
    assert torch.equal(loaded["w"], torch.arange(1000.0))
    assert {(m.file, m.source) for m in report.recovered} == {(file.name, str(copy))}
    with pytest.raises(UnsupportedError, match="has no parity files"):
        save(single, tmp_path / "no", format, options=SaveOptions(parity=2))
    assert not (tmp_path / "no").exists()


def test_options_that_dcp_cannot_follow_raise_an_error() -> None:
    with pytest.raises(DeclarationError, match=r"does not follow SaveOptions\.parity, compare_replicas"):
        MegackptStorageWriter(options=SaveOptions(parity=2, compare_replicas=Policy.WARN))
    with pytest.raises(DeclarationError, match=r"does not follow LoadOptions\.on_corrupt"):
        MegackptStorageReader(options=FALLBACK)


def is_whole(directory: Path) -> bool:
    return verify(directory, deep=True).is_whole is True


def test_removal_of_arrays_keeps_the_files_that_parity_needs(tmp_path: Path) -> None:
    """And removes a group when no array is left in it."""

    def state_of(rank: int) -> dict[str, object]:
        # Ranks 0 and 2 are in one group, 1 and 3 in the other.
        key = "model" if rank == 0 else f"optimizer.{rank}"
        return {"w": sharded(key, torch.full((4,), float(rank)))}

    SimulatedWorld(4).run(saving(state_of, tmp_path, options=SaveOptions(parity=2)))
    remove_sharded_tensors(tmp_path, "optimizer")
    assert [file.name[17:22] for file in data_files(tmp_path)] == ["00000", "00002"]
    assert len(list(tmp_path.glob("parity/*"))) == 1
    assert is_whole(tmp_path)
    flip(data_files(tmp_path)[1], -1)
    assert not is_whole(tmp_path)  # nobody loads it, and it protects the other
    flip(data_files(tmp_path)[1], -1)
    data_files(tmp_path)[0].unlink()
    wanted = sharded("model", torch.ones(4))
    assert torch.equal(load({"w": wanted}, tmp_path, options=FALLBACK)["w"], torch.zeros(4))
    remove_sharded_tensors(tmp_path, "model")
    assert not list(tmp_path.rglob("parity*/*"))


def test_the_next_save_removes_parity_files(tmp_path: Path) -> None:
    saved(tmp_path, SaveOptions(parity=2))
    saved(tmp_path)
    assert not [path for path in tmp_path.rglob("*parity*") if path.is_file()]
    read(tmp_path)


def test_a_failed_save_leaves_no_parity_files() -> None:
    class WithoutDeletes(MemoryStore):
        def write(self, name: str, data: bytes) -> None:
            if name.startswith("parity-"):
                raise StorageError("no")
            super().write(name, data)

    store = WithoutDeletes()
    single = {"w": sharded("w", torch.ones(3))}
    with pytest.raises(StorageError):
        save(single, store, options=SaveOptions(parity=2))
    assert store.names() == []


def run_steps(root: Path, *, steps: int) -> None:
    def run(group: Group) -> None:
        with Checkpointer(root, group=group) as checkpointer:
            for step in range(1, steps + 1):
                checkpointer.save(step, state(group.rank, value=float(step)))

    SimulatedWorld(RANKS).run(run)


def load_latest(root: Path, options: LoadOptions, step: int | None = None) -> list[Any]:
    def run(group: Group) -> Any:
        with Checkpointer(root, group=group, load_options=options) as checkpointer:
            loaded = checkpointer.load(state(group.rank, value=None), step=step)
            assert checkpointer.last_load is not None
            passed = [over.step for over in checkpointer.last_load.skipped]
            return checkpointer.last_load.step, passed, float(loaded["small"][0]), float(loaded["rows"][1])

    return SimulatedWorld(RANKS).outcomes(run)


def test_all_ranks_go_back_to_the_same_older_step_where_one_cannot_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_steps(tmp_path, steps=3)
    flip(data_files(tmp_path / "iter_0000003")[1], 5000)  # only rank 1 reads this
    next((tmp_path / "iter_0000002").glob("index-*")).unlink()
    assert load_latest(tmp_path, FALLBACK) == [(1, [3, 2], 1.0, rank + 1.0) for rank in range(RANKS)]
    assert "Step 3 cannot be loaded; going back to step 2" in caplog.text
    # A step that was asked for is loaded or not.
    for outcome in (*load_latest(tmp_path, LoadOptions()), *load_latest(tmp_path, FALLBACK, step=3)):
        assert isinstance(outcome, IntegrityError)
    flip(data_files(tmp_path / "iter_0000001")[0], 5000)
    for outcome in load_latest(tmp_path, FALLBACK):
        assert isinstance(outcome, IntegrityError)
        assert "None of the steps 3, 2, 1 can be loaded" in str(outcome)


def test_a_copy_of_the_step_is_asked_before_an_older_step(tmp_path: Path) -> None:
    run_steps(tmp_path / "it", steps=2)
    copy = copy_of(tmp_path / "it")
    flip(data_files(tmp_path / "it/iter_0000002")[1], 5000)
    options = LoadOptions(on_corrupt="fallback", copies=(copy,))
    assert load_latest(tmp_path / "it", options) == [(2, [], 2.0, rank + 2.0) for rank in range(RANKS)]
