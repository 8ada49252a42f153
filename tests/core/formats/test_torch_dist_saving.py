"""What we write as torch_dist: read by stock DCP and by us, replaced all at once."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megackpt import (
    DeclarationError,
    IntegrityError,
    LoadOptions,
    NotACheckpointError,
    ShardedObject,
    ShardedTensor,
    StorageError,
    convert,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    save,
    verify,
)
from megackpt.errors import FormatError, UnserializableError
from megackpt.formats.torch_dist import TorchDistSaveStrategy
from megackpt.formats.torch_dist import item as items
from megackpt.formats.torch_dist.item import frame_of, stream
from megackpt.formats.torch_dist.values import MAX_VALUES
from megackpt.plans.metadata import DTYPES
from megackpt.run import remove_sharded_tensors
from megackpt.storage import MemoryStore
from megackpt.testing.faulty_store import FaultyStore
from tests.support.checkpoints import flip
from tests.support.dcp_alone import ALONE
from tests.support.effort import sampled
from tests.support.states import bits, filled, flat_range, random_bits, save_on_ranks, sharded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

SHAPE = (6, 5)
OF_TORCH = [dtype for dtype in DTYPES if hasattr(torch, dtype)]  # torch 2.6 lacks one of them


def whole(dtype: str) -> torch.Tensor:
    """The global array of a dtype."""
    return random_bits(dtype, SHAPE)


def state_of(rank: int) -> dict[str, Any]:
    """Two ranks: rows, columns that are not contiguous, flat shards, replicas, objects, common state."""
    state: dict[str, Any] = {"step": 7, "schedule": {"lr": 0.5, "betas": (0.9, 0.99)}}
    for dtype in OF_TORCH:
        array = whole(dtype)
        rows = array[rank * 3 : rank * 3 + 3].clone()
        state[f"rows.{dtype}"] = sharded(f"rows.{dtype}", rows, (0, rank, 2))
        state[f"flat.{dtype}"] = flat_range(f"flat.{dtype}", array, *((0, 17), (17, 30))[rank])
        state[f"same.{dtype}"] = sharded(f"same.{dtype}", array.T, replica_id=rank)
    state["scalar"] = sharded("scalar", torch.tensor(2.5), replica_id=rank)
    state["empty"] = sharded("empty", torch.zeros(0, 3), replica_id=rank)
    state["rng"] = ShardedObject("rng", {"rank": rank}, (2,), (rank,))
    return state


def expected() -> dict[str, torch.Tensor]:
    arrays: dict[str, torch.Tensor] = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}
    for dtype in OF_TORCH:
        array = whole(dtype)
        arrays |= {f"rows.{dtype}": array, f"flat.{dtype}": array, f"same.{dtype}": array.T}
    return arrays


def same_bits(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (actual.shape, actual.dtype, bits(actual)) == (wanted.shape, wanted.dtype, bits(wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torch_dist") / "c"
    save_on_ranks(2, state_of, directory, "torch_dist", content_metadata={"a": 1})
    return directory


def test_metadata_json_holds_what_megatron_allows_and_nothing_else(saved: Path) -> None:
    assert json.loads((saved / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_common_pt_holds_common_state_as_megatron_stores_it(saved: Path) -> None:
    assert torch.load(saved / "common.pt", weights_only=True) == {
        "step": 7,
        "schedule": {"lr": 0.5, "betas": (0.9, 0.99)},
        "content_metadata": {"a": 1},
    }
    assert load_common_state_dict(saved) == {"step": 7, "schedule": {"lr": 0.5, "betas": (0.9, 0.99)}}
    assert load_content_metadata(saved) == {"a": 1}


def test_stock_dcp_loads_every_array_bit_for_bit(saved: Path) -> None:
    wanted = expected()
    loaded = {key: torch.zeros_like(array) for key, array in wanted.items()}
    dcp.load(loaded, checkpoint_id=saved, **ALONE)
    for key, array in wanted.items():
        assert same_bits(loaded[key], array), key


def all_that_dcp_finds(directory: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    reader, planner = dcp.FileSystemReader(directory), _EmptyStateDictLoadPlanner()
    dcp.state_dict_loader._load_state_dict(results, storage_reader=reader, planner=planner, no_dist=True)
    return results


def test_stock_dcp_finds_all_there_is_without_hints(saved: Path, tmp_path: Path) -> None:
    results = all_that_dcp_finds(saved)
    objects = {f"rng/shard_{rank}_2": [{"rank": rank}] for rank in range(2)}  # in lists, as Megatron's
    values = {"step": 7, "schedule": {"lr": 0.5, "betas": (0.9, 0.99)}}
    assert set(results) == {*expected(), *objects, *values}
    assert {key: results[key] for key in values} == values
    for key, array in expected().items():
        assert same_bits(results[key], array), key
    assert {key: results[key] for key in objects} == objects
    dcp_to_torch_save(saved, tmp_path / "all.pt")
    assert set(torch.load(tmp_path / "all.pt", weights_only=False)) == set(results)


@pytest.mark.parametrize("has_index", [True, False])
def test_we_load_it_at_another_layout_with_our_index_and_without(
    saved: Path, tmp_path: Path, has_index: bool
) -> None:
    directory = tmp_path / "c"
    directory.mkdir()
    for file in saved.iterdir():
        if has_index or not file.name.startswith("megackpt-"):
            (directory / file.name).write_bytes(file.read_bytes())
    for rank in range(5):
        request = {
            f"{kind}.{dtype}": sharded(
                f"{kind}.{dtype}", torch.zeros(6, 1, dtype=getattr(torch, dtype)), (1, rank, 5)
            )
            for dtype in OF_TORCH
            for kind in ("rows", "flat")
        }
        loaded = load(request | {"rng": ShardedObject("rng", None, (2,), (rank % 2,))}, directory)
        for key in request:
            assert same_bits(loaded[key], whole(key.partition(".")[2])[:, rank : rank + 1]), key
        assert loaded["rng"] == {"rank": rank % 2}
        assert loaded["step"] == 7
    result = load_plain_tensors(directory)
    assert all(same_bits(result[key], array) for key, array in expected().items())
    assert load_content_metadata(directory) == {"a": 1}


@pytest.mark.parametrize("threads", [1, 3])
def test_each_rank_writes_as_many_files_as_asked_for_balanced_by_bytes(tmp_path: Path, threads: int) -> None:
    tensors = {f"t{i}": torch.randn(1000 * (i + 1)) for i in range(8)}
    state = {k: sharded(k, t) for k, t in tensors.items()}
    save(state, tmp_path / "c", TorchDistSaveStrategy(thread_count=threads))
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")]
    assert len(sizes) == threads
    assert max(sizes) < 1.3 * min(sizes)
    loaded = load_plain_tensors(tmp_path / "c")
    assert all(torch.equal(loaded[k], t) for k, t in tensors.items())
    with pytest.raises(DeclarationError, match="thread_count is 0"):
        TorchDistSaveStrategy(thread_count=0)


def test_a_gap_before_the_tensor_that_torch_has_not_filled_so_is_left_to_torch() -> None:
    frame = frame_of("float32", (3,))
    head = bytearray(frame.head)
    assert items.locate(bytes(head), length=frame.length, dtype="float32", shape=(3,)) == len(head)
    head[-5] ^= 1
    assert items.locate(bytes(head), length=frame.length, dtype="float32", shape=(3,)) is None


def test_whole_arrays_are_loaded_without_those_that_the_options_exclude(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(2), "b": torch.zeros(3)}, "lr": torch.tensor(0.1)}, tmp_path / "c")
    options = LoadOptions(exclude=("model.a", "lr"))
    assert load_plain_tensors(tmp_path / "c", options=options).keys() == {"model.b"}


def test_a_tensor_that_repeats_its_elements_takes_no_memory_that_nobody_stored(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "c", ("torch_dist", 1))
    for file in (*(tmp_path / "c").glob("megackpt-*"), *(tmp_path / "c").glob("common-*")):
        file.unlink()  # what is left is Megatron-Core's form

    def stored(elements: int) -> dict[str, torch.Tensor]:
        torch.save({"ones": torch.ones(1).expand(elements)}, tmp_path / "c" / "common.pt")
        return load_plain_tensors(tmp_path / "c")

    assert stored(1 << 20)["ones"].sum() == 1 << 20
    with pytest.raises(FormatError, match=r"'ones' is an expanded tensor .* 4,398,046,511,104 bytes"):
        stored(1 << 40)


def test_a_changed_byte_of_a_tensor_is_found(tmp_path: Path) -> None:
    save({"w": sharded("w", torch.zeros(1000))}, tmp_path / "c", "torch_dist")
    (file,) = (tmp_path / "c").glob("*.distcp")
    flip(file, 2000)
    with pytest.raises(IntegrityError, match=r"'w' \[0:1000\]: the bytes"):
        load_plain_tensors(tmp_path / "c")


def test_chunks_that_overlap_raise_an_error_where_they_were_not_validated(tmp_path: Path) -> None:
    state = [ShardedTensor("w", torch.zeros(n), torch.float32, (n,), (4,), (0,), None) for n in (4, 2)]
    with pytest.raises(DeclarationError, match="cannot hold two chunks that begin at"):
        save({"w": state}, tmp_path / "c", "torch_dist", validate_access_integrity=False)


def test_a_replica_that_two_ranks_store_unproved_is_stored_once(tmp_path: Path) -> None:
    state = {"w": sharded("w", torch.ones(4))}
    save_on_ranks(2, lambda _: state, tmp_path / "c", "torch_dist", validate_access_integrity=False)
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [1.0] * 4


def test_content_metadata_and_a_key_of_its_name_are_distinguished(tmp_path: Path) -> None:
    state = {"content_metadata": "mine", "step": 1}
    save(state, tmp_path / "c", "torch_dist")
    assert load_common_state_dict(tmp_path / "c") == state
    assert load_content_metadata(tmp_path / "c") is None
    with pytest.raises(UnserializableError, match="content_metadata: the state dict has this key"):
        save(state, tmp_path / "c", "torch_dist", content_metadata={"a": 1})
    assert load_common_state_dict(tmp_path / "c") == state


def test_arrays_are_removed_for_us_and_for_dcp(tmp_path: Path) -> None:
    tensors = {key: torch.full((4,), float(i)) for i, key in enumerate(("a", "b.x", "b.y"))}
    state: dict[str, Any] = {k: sharded(k, t) for k, t in tensors.items()}
    state["o"] = ShardedObject("b.object", 1, (1,), (0,))
    save(state | {"step": 3}, tmp_path / "c", TorchDistSaveStrategy(thread_count=4))
    for prefix, left in (("b.", {"a"}), ("nothing", {"a"}), ("a", set())):
        remove_sharded_tensors(tmp_path / "c", prefix)
        assert set(load_sharded_metadata(tmp_path / "c")) == left
        assert set(all_that_dcp_finds(tmp_path / "c")) == {*left, "step"}  # common state stays
        assert len(list((tmp_path / "c").glob("__*.distcp"))) == len(left)
        assert load_common_state_dict(tmp_path / "c") == {"step": 3}
        assert len(list((tmp_path / "c").glob("megackpt-*"))) == 2


# --- replacing


def values(value: float) -> dict[str, Any]:
    tensors = [filled(value, 1000, key=f"t{i}") for i in range(3)]
    return {"model": tensors, "value": value, "o": ShardedObject("o", value, (1,), (0,))}


def value_of(store: MemoryStore) -> float:
    """Load everything there is and return the one value that all of it has."""
    result = {float(v) for t in load_plain_tensors(store).values() for v in t.unique()}
    loaded = load({"o": ShardedObject("o", None, (1,), (0,))}, store)
    result |= {loaded["value"], loaded["o"]}
    assert len(result) == 1, f"a mixture: {result}"
    return result.pop()


def saved_in_memory(value: float, *, is_foreign: bool = False) -> Callable[[], MemoryStore]:
    """Copies of a checkpoint; a foreign one is what Megatron-Core leaves: without what we add."""
    store = MemoryStore()
    save(values(value), store, "torch_dist")
    ours = ("megackpt-", "common-") if is_foreign else ()
    files = {n: store.read(n, max_bytes=1 << 20) for n in store.names() if not n.startswith(ours)}
    return lambda: MemoryStore(files=files)


class Killed(BaseException):
    """The process is gone: nothing is cleaned up."""


def kill(_: object) -> None:
    raise Killed


def after_each_kill(new_copy: Callable[[], MemoryStore], *, after: bool = False) -> Iterator[MemoryStore]:
    """Yield a copy for each operation at which a save of 2.0 may be killed, and one in which it ended."""
    for kill_at in range(200):
        inner = new_copy()
        store = FaultyStore(inner, fail_at=kill_at, hook=kill, after=after)
        with contextlib.suppress(Killed):
            save(values(2.0), store, TorchDistSaveStrategy(thread_count=1))
        yield inner
        if len(store.operations) <= kill_at:
            return


@sampled(4)
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_kill_between_any_two_operations_leaves_the_old_checkpoint_or_the_new_one(
    is_foreign: bool, after: bool
) -> None:
    seen = []
    for store in after_each_kill(saved_in_memory(1.0, is_foreign=is_foreign), after=after):
        seen.append(value_of(store))
        save(values(3.0), store, "torch_dist")
        assert value_of(store) == 3.0
    assert seen == sorted(seen)  # old until the one moment of the commit, new from then on
    assert seen.count(1.0) >= 8
    assert seen.count(2.0) >= 3


def test_a_kill_in_a_first_save_leaves_nothing_or_all_of_it() -> None:
    outcomes = []
    for store in after_each_kill(MemoryStore):
        try:
            outcomes.append(value_of(store))
        except NotACheckpointError:
            outcomes.append(0.0)
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {0.0, 2.0}


@sampled(4)
@pytest.mark.parametrize("is_foreign", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_fails_at_any_operation_leaves_one_whole_checkpoint_and_no_rubbish(
    is_foreign: bool, after: bool
) -> None:
    failed = 0
    files = len(saved_in_memory(1.0)().names())
    new_copy = saved_in_memory(1.0, is_foreign=is_foreign)
    for fail_at in range(200):
        inner = new_copy()
        store = FaultyStore(inner, fail_at=fail_at, after=after)
        try:
            save(values(2.0), store, "torch_dist")
        except StorageError:
            failed += 1
            struck = store.operations[fail_at]
            # What fails behind the commit, the replacement of .metadata, or reports a failure of the commit
            # that has happened, leaves the new checkpoint.
            is_new = struck.name == "metadata.json" or (after and struck.name == ".metadata")
            assert value_of(inner) == (2.0 if is_new else 1.0), struck
        else:
            assert value_of(inner) == 2.0
        save(values(3.0), inner, "torch_dist")
        assert value_of(inner) == 3.0
        assert len(inner.names()) == files
        if len(store.operations) <= fail_at:
            break
    assert failed >= 10


def test_what_a_death_inside_of_a_replacement_leaves_is_removed_by_the_next_save(tmp_path: Path) -> None:
    save(values(1.0), tmp_path / "c", "torch_dist")
    for name in ("..metadata.0123abcd.tmp", ".common.pt.0123abcd.tmp", ".common.pt.note"):
        (tmp_path / "c" / name).write_text("half")
    save(values(2.0), tmp_path / "c", "torch_dist")
    hidden = {f.name for f in (tmp_path / "c").iterdir() if f.name.startswith(".")}
    assert hidden == {".metadata", ".common.pt.note"}


def test_stock_dcp_loads_values_that_are_no_tensors(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}]
    plain: dict[str, Any] = {
        "step": 7,
        "args": Namespace(tp=2, name="run"),
        "none": None,
        "optimizer": {"param_groups": groups, "empty": {}},
        "w": 3,  # also the key of an array, which comes first
    }
    state = {**plain, "array": sharded("w", torch.arange(3.0))}
    state["rng"] = ShardedObject("rng", [1, 2], (1,), (0,))
    save(state, tmp_path / "c", "torch_dist")
    wanted: dict[str, Any] = {
        "step": 0,
        "args": None,
        "none": 1,
        "optimizer": {"param_groups": [{"lr": 0.0, "params": [9]}, {"lr": 0.0, "params": [9]}]},
        "w": torch.zeros(3),
        "rng": None,
    }
    dcp.load(wanted, checkpoint_id=tmp_path / "c", **ALONE)
    assert wanted["step"] == 7
    assert wanted["args"] == plain["args"]
    assert wanted["none"] is None
    assert wanted["optimizer"] == {"param_groups": groups}
    assert wanted["rng"] == [1, 2]
    assert torch.equal(wanted["w"], torch.arange(3.0))


def test_values_that_dcp_saved_are_read_by_dcp_after_two_conversions(tmp_path: Path) -> None:
    state = {"step": 7, "args": Namespace(tp=2), "nested": {"lr": [0.1, 0.2]}, "w": torch.arange(3.0)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", **ALONE)
    for source, target, backend in (("dcp", "native", "megackpt"), ("native", "again", "torch_dist")):
        convert(tmp_path / source, tmp_path / target, backend)
    wanted = {"step": 0, "args": None, "nested": {"lr": None}, "w": torch.zeros(3)}
    dcp.load(wanted, checkpoint_id=tmp_path / "again", **ALONE)
    assert torch.equal(wanted.pop("w"), torch.arange(3.0))
    assert wanted == {"step": 7, "args": Namespace(tp=2), "nested": {"lr": [0.1, 0.2]}}


def test_copies_for_dcp_are_no_arrays_of_ours_and_stay_with_their_common_state(tmp_path: Path) -> None:
    state = {
        "opt": {"lr": 0.5},
        "w": sharded("opt.w", torch.zeros(3)),
        "rng": ShardedObject("opt.rng", 1, (1,), (0,)),
    }
    save(state, tmp_path / "c", "torch_dist")
    assert verify(tmp_path / "c").damages == ()
    remove_sharded_tensors(tmp_path / "c", "opt")
    assert verify(tmp_path / "c").damages == ()
    wanted = {"opt": {"lr": 0.0}}
    dcp.load(wanted, checkpoint_id=tmp_path / "c", **ALONE)
    assert wanted == {"opt": {"lr": 0.5}}
    for name in [f.name for f in (tmp_path / "c").iterdir() if f.name.startswith("megackpt-")]:
        (tmp_path / "c" / name).unlink()
    assert load_sharded_metadata(tmp_path / "c") == {}
    assert load_common_state_dict(tmp_path / "c") == {"opt": {"lr": 0.5}}


def test_state_of_very_many_values_has_no_copies(tmp_path: Path) -> None:
    save({"many": {str(i): i for i in range(MAX_VALUES + 1)}}, tmp_path / "c", "torch_dist")
    assert not list((tmp_path / "c").glob("values-*"))
    save({"few": 1}, tmp_path / "d", TorchDistSaveStrategy(values_for_dcp=False))
    assert not list((tmp_path / "d").glob("values-*"))


def test_a_changed_copy_is_found(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "c", "torch_dist")
    (file,) = (tmp_path / "c").glob("values-*")
    flip(file, 100)
    (damage,) = verify(tmp_path / "c").damages
    assert damage.file == file.name


LOCAL = struct.Struct("<4sH")


@pytest.mark.parametrize(("zip64_from", "version"), [(1 << 32, 20), (1, 45)])
def test_an_item_needs_zip_2_0_and_only_with_64_bit_sizes_4_5(
    zip64_from: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "ZIP64_FROM", zip64_from)
    data = b"".join(stream(frame_of("uint8", (5,)), [memoryview(b"01234")]))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename.rpartition("/")[2]: entry for entry in archive.infolist()}
    needed = {name: LOCAL.unpack_from(data, entry.header_offset)[1] for name, entry in entries.items()}
    assert needed.pop("0") == version  # the bytes of the tensor
    assert set(needed.values()) == {20}
