"""What save and load do: the ordinary case, and traps around it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megackpt import (
    DeclarationError,
    FormatError,
    LoadOptions,
    LocalNonpersistentObject,
    MismatchError,
    ReplicatedValue,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StorageError,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_with_report,
    save,
)
from megackpt.comm import Group
from megackpt.errors import UnserializableError
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.formats.registry import save_strategy
from megackpt.plans.geometry import Ints
from megackpt.plans.planning import SavePlan
from megackpt.storage import LocalStore, MemoryStore
from megackpt.storage.file_writer import FileWriter
from tests.support.states import sharded
from tests.support.worlds import error_of_all, saving


def test_load_fills_given_tensors_in_place_and_makes_others_while_the_request_stays(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save({"w": sharded("w", source.weight), "v": sharded("v", torch.arange(6.0))}, tmp_path)
    plain = torch.zeros(2, 3)
    request = {
        "parameter": sharded("w", target.weight),
        "tensor": sharded("w", plain),
        "without data": sharded("v", torch.zeros(6)).without_data(),
    }
    loaded = load(request, tmp_path)
    assert loaded["tensor"] is plain
    assert torch.equal(plain, source.weight)
    assert torch.equal(target.weight, source.weight)
    assert target.weight.requires_grad
    assert target.weight.is_leaf
    assert torch.equal(loaded["without data"], torch.arange(6.0))
    assert request["without data"].data is None


def test_common_state_is_merged_into_the_structure_of_the_request(tmp_path: Path) -> None:
    state = {
        "model": [sharded("a", torch.ones(2)), {"step": 7, "b": sharded("b", torch.ones(3))}, "text"],
        "args": OrderedDict(lr=0.1),
        "skip": LocalNonpersistentObject("saved side"),
    }
    save(state, tmp_path / "c")
    request = {
        "model": [sharded("a", torch.zeros(2)), {"b": sharded("b", torch.zeros(3)), "step": "dropped"}],
        "skip": LocalNonpersistentObject("loading side"),
        "ignored": 1,
    }
    loaded = load(request, tmp_path / "c")
    assert loaded["model"][0].sum() == 2
    assert loaded["model"][1] == {"step": 7, "b": loaded["model"][1]["b"]}
    assert loaded["model"][2] == "text"
    assert loaded["args"] == OrderedDict(lr=0.1)
    assert isinstance(loaded["args"], OrderedDict)
    assert loaded["skip"] == "loading side"
    assert "ignored" not in loaded
    assert "skip" not in load({}, tmp_path / "c")


def test_neither_save_nor_load_changes_the_state_dict_it_is_given(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, *_: object) -> list[ShardedTensor]:
        return [sharded(f"{key}.0", data)]

    factory = ShardedTensorFactory("f", torch.arange(4.0), build, lambda parts: parts[0])
    entity = ShardedObject("o", {"a": 1}, (1,), (0,))
    state = {"f": factory, "o": entity, "list": [1, sharded("w", torch.ones(1))]}
    before = copy.copy(state), copy.copy(state["list"])
    save(state, tmp_path / "c")
    load(state, tmp_path / "c")
    assert state == before[0]
    assert state["list"] == before[1]
    assert state["f"] is factory


def test_what_a_checkpoint_holds_can_be_listed_without_reading_it(tmp_path: Path) -> None:
    array = sharded("a", torch.zeros(2, 3, dtype=torch.bfloat16))
    state = {"a": array, "o": ShardedObject("o", "x", (1,), (0,)), "lr": 0.5}
    save(state, tmp_path / "c", content_metadata={"layout": "tp2"})
    listed = load_sharded_metadata(tmp_path / "c")
    assert set(listed) == {"a", "o/shard_0_1"}
    assert (listed["a"].global_shape, listed["a"].dtype, listed["a"].data) == ((2, 3), torch.bfloat16, None)
    assert load_common_state_dict(tmp_path / "c") == {"lr": 0.5}
    assert load_content_metadata(tmp_path / "c") == {"layout": "tp2"}


def test_large_tensors_are_exact_across_block_and_read_boundaries(tmp_path: Path) -> None:
    # 2-D, larger than one read (8 MiB), cut by columns: strided blocks on both sides, near and far rows.
    array = torch.randint(0, 2**31, (70, 60_001), dtype=torch.int32)
    shape = tuple(array.shape)

    def box(data: torch.Tensor, *offset: int) -> ShardedTensor:
        return ShardedTensor("w", data, torch.int32, tuple(data.shape), shape, offset)

    shards = [box(array[:, a:b].contiguous(), 0, a) for a, b in ((0, 20_000), (20_000, 60_001))]
    save({"w": shards[:1], "x": shards[1]}, tmp_path / "c")
    assert torch.equal(load_plain_tensors(tmp_path / "c")["w"], array)
    middle = torch.zeros(33, 30_000, dtype=torch.int32)
    load({"m": box(middle, 20, 9_999)}, tmp_path / "c")
    assert torch.equal(middle, array[20:53, 9_999:39_999])
    flat = torch.zeros(3_000_000, dtype=torch.int32)
    owned = slice(100_001, 3_100_001)
    part = ShardedTensor("w", flat, torch.int32, shape, shape, (0, 0), flattened_range=owned)
    load({"f": part}, tmp_path / "c")
    assert torch.equal(flat, array.reshape(-1)[owned])


def test_a_data_file_opens_in_stock_safetensors_under_the_arrays_own_names(tmp_path: Path) -> None:
    weight = torch.randn(3, 5, dtype=torch.bfloat16)
    complex_ones = torch.ones(3, dtype=torch.complex64)
    save({"w": sharded("layer.weight", weight), "z": sharded("z", complex_ones)}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").glob("*.safetensors")
    stored = safetensors.torch.load_file(file)
    assert torch.equal(stored["layer.weight"], weight)
    assert set(stored) == {"layer.weight", "z"}


def test_overwriting_replaces_the_checkpoint_and_leaves_no_old_files_but_strangers(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    save({"w": sharded("w", torch.zeros(3)), "old": 1}, directory)
    (directory / "tokenizer.model").write_bytes(b"not ours")
    save({"w": sharded("w", torch.ones(3))}, directory)
    assert load_plain_tensors(directory)["w"].sum() == 3
    assert load_common_state_dict(directory) == {}
    files = sorted(str(p.relative_to(directory)).split("-")[0] for p in directory.rglob("*") if p.is_file())
    attempts = {p.name.removesuffix(p.suffix)[-22:] for p in directory.glob("data/*")}
    assert len(attempts) == 1
    assert [f for f in files if not f.startswith("data/")] == [
        "common", "index", "metadata.json", "tokenizer.model",
    ]  # fmt: skip


@pytest.mark.parametrize("saved_as", [("megackpt", 1), ("torch_dist", 1), ("zarr", 3)], ids=str)
def test_a_load_may_name_the_format_that_it_wants(saved_as: tuple[str, int], tmp_path: Path) -> None:
    state = {"w": sharded("w", torch.arange(4.0))}
    strategy = save_strategy(saved_as)
    save(state, tmp_path, strategy)
    for choice in (None, saved_as, saved_as[0], strategy):
        target = {"w": sharded("w", torch.zeros(4))}
        assert torch.equal(load(target, tmp_path, choice)["w"], torch.arange(4.0))
    others = {("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3)} - {saved_as}
    for other in others:
        message = rf"in format '{saved_as[0]}' version {saved_as[1]}.*'{other[0]}'"
        with pytest.raises(MismatchError, match=message):
            load_with_report({"w": sharded("w", torch.zeros(4))}, tmp_path, other)


def test_a_load_rejects_what_is_no_format(tmp_path: Path) -> None:
    save({"w": sharded("w", torch.arange(4.0))}, tmp_path)
    for wrong, message in [("tar", "'tar'"), (("zarr", 9), "9"), (3, "sharded_strategy is 3")]:
        with pytest.raises(DeclarationError, match=message):
            load({"w": sharded("w", torch.zeros(4))}, tmp_path, wrong)


def test_only_what_lies_outside_of_the_stored_shape_is_padded(tmp_path: Path) -> None:
    half = sharded("w", torch.ones(4), (0, 0, 2))
    save({"w": half}, tmp_path / "c", validate_access_integrity=False)
    for numel in (8, 10):
        with pytest.raises(FormatError, match="has no data for some elements"):
            load({"w": sharded("w", torch.zeros(numel), allow_shape_mismatch=True)}, tmp_path / "c")


def test_a_strategy_whose_rounds_fail_on_one_rank_is_an_error_of_all() -> None:
    class WithFailingRounds(NativeSaveStrategy):
        def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
            if rank == 1:
                raise UnserializableError("no such rows", key="w")
            return super().rounds(plan, rank)

    def state_of(rank: int) -> dict[str, Any]:
        return {"w": sharded("w", torch.ones(2), (0, rank, 3))}

    error = error_of_all(3, saving(state_of, MemoryStore(), WithFailingRounds()), UnserializableError)
    assert "no such rows" in str(error)


def test_without_validation_ranks_that_disagree_all_learn_it(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        tensor = sharded("w", torch.ones(2 + rank), replica_id=rank)
        return {"w": tensor, "v": sharded("v", torch.ones(2 + rank), (0, rank, 2))}

    disagree = saving(state_of, tmp_path / "c", validate_access_integrity=False)
    assert "'v'" in str(error_of_all(2, disagree, MismatchError))


def test_ranks_that_open_different_checkpoints_raise_an_error(tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        save({"w": sharded("w", torch.full((2,), value))}, tmp_path / name)

    def load_rank(group: Group) -> None:
        load({"w": sharded("w", torch.zeros(2))}, tmp_path / ("old", "new")[group.rank], group=group)

    error = error_of_all(2, load_rank, MismatchError)
    assert f"{tmp_path}/old on rank 0 and {tmp_path}/new on rank 1" in str(error)


def test_a_checkpoint_that_was_saved_anew_while_ranks_opened_it_raises_an_error() -> None:
    stores = [MemoryStore("run"), MemoryStore("run")]
    for value, store in enumerate(stores):
        save({"w": sharded("w", torch.full((2,), float(value)))}, store)

    def load_rank(group: Group) -> None:
        load({"w": sharded("w", torch.zeros(2))}, stores[group.rank], group=group)

    error = error_of_all(2, load_rank, MismatchError)
    assert "run was saved anew while it was being opened" in str(error)


def test_what_is_excluded_without_data_is_left_out_not_invented(tmp_path: Path) -> None:
    save({"w": sharded("w", torch.ones(2))}, tmp_path / "c")
    request = {"w": sharded("w", torch.zeros(2)).without_data()}
    assert load(request, tmp_path / "c", options=LoadOptions(exclude=("w",))) == {}


def test_a_plain_value_is_declared_once_a_rank(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"b: a rank declares the plain value 'k' twice"):
        save({"a": ReplicatedValue("k", 1), "b": ReplicatedValue("k", 2)}, tmp_path / "c")


def test_a_loaded_value_that_is_a_container_is_not_mixed_with_common_state(tmp_path: Path) -> None:
    stored = ShardedObject("o", {"x": 1}, (1,), (0,))
    save({"args": {"a": 1, "b": 2}, "l": [1, 2], "e": [1], "o": stored}, tmp_path / "c")
    ours = {"args": {"a": 5}, "l": [9], "e": []}
    asked = {name: LocalNonpersistentObject(value) for name, value in ours.items()}
    loaded = load({**asked, "o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c")
    assert loaded == {**ours, "o": {"x": 1}}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(4, dtype=torch.complex64).conj(), "conjugate"),
        (torch.zeros(4, dtype=torch.complex64, device="meta"), "meta device"),
        (torch.zeros(1, dtype=torch.complex64).expand(4), "overlapping"),
        (torch.zeros(5, dtype=torch.complex64).as_strided((4,), (0,)), "overlapping"),
    ],
)
def test_a_tensor_that_cannot_be_filled_in_place_raises_an_error_with_its_key(
    tmp_path: Path, target: torch.Tensor, message: str
) -> None:
    save({"w": sharded("w", torch.ones(4, dtype=torch.complex64))}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=rf"'w': the tensor is .*{message}"):
        load({"w": sharded("w", target)}, tmp_path / "c")


@pytest.mark.parametrize("data", [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()])
def test_a_tensor_without_elements_in_memory_cannot_be_saved(tmp_path: Path, data: torch.Tensor) -> None:
    with pytest.raises(DeclarationError, match=r"'w': the tensor is .*(to_empty|to_dense)") as caught:
        save({"w": sharded("w", data)}, tmp_path / "c")
    assert "load_on_device" not in str(caught.value)  # which is for loads


def test_an_expanded_tensor_is_saved_as_what_it_looks_like(tmp_path: Path) -> None:
    save({"w": sharded("w", torch.tensor([[1.0], [2.0]]).expand(2, 3))}, tmp_path / "c")
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("hide", [lambda e: (e,), lambda e: ((e,),), lambda e: deque([e]), lambda e: ([e],)])
def test_entities_inside_of_other_containers_raise_an_error_at_save_and_load(
    tmp_path: Path, hide: Any
) -> None:
    state = {"model": {"pair": hide(sharded("w", torch.zeros(1)))}}
    message = r"model\.pair: a ShardedTensor is inside of a (tuple|deque).*list or a dict"
    with pytest.raises(DeclarationError, match=message):
        save(state, tmp_path / "c")
    save({}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=r"model\.pair"):
        load(state, tmp_path / "c")


def test_a_state_dict_that_contains_itself_raises_an_error(tmp_path: Path) -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    with pytest.raises(UnserializableError, match="contains itself"):
        save(cycle, tmp_path / "c")


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize(
    "value", [defaultdict(lambda: 1), "lone \udc80", {1, (2, frozenset({object()}))}, lambda: None]
)
def test_what_has_no_codec_raises_an_error_before_anything_is_written(
    tmp_path: Path, value: Any, validate: bool
) -> None:
    state = {"w": sharded("w", torch.ones(2)), "args": {"x": [value]}}
    with pytest.raises(UnserializableError, match=r"^args\.x\[0\]"):
        save(state, tmp_path / "c", validate_access_integrity=validate)
    assert not (tmp_path / "c" / "data").exists()


def test_a_key_that_is_not_unicode_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="without lone surrogates"):
        save({"w": sharded("w\udc80", torch.zeros(1))}, tmp_path / "c")


def test_of_two_saves_to_one_path_the_later_commit_does_not_point_to_what_is_gone(tmp_path: Path) -> None:
    class SecondJobFinishesFirst(LocalStore):
        def write(self, name: str, data: bytes) -> None:
            if name.startswith("common-"):
                for path in (tmp_path / "c" / "data").iterdir():
                    path.unlink()  # as the clean-up of a job does that does not know this save
                save({"w": sharded("w", torch.full((2,), 2.0))}, tmp_path / "c")
            super().write(name, data)

    with pytest.raises(StorageError, match=r"is gone\. Do all ranks see one directory\?"):
        save({"w": sharded("w", torch.ones(2))}, SecondJobFinishesFirst(tmp_path / "c"))
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0, 2.0]


def test_a_save_leaves_the_files_of_saves_that_began_later(tmp_path: Path) -> None:
    class AnotherBegins(LocalStore):
        def open_writer(self, name: str, nbytes: int) -> FileWriter:
            if name.startswith("index-"):
                (tmp_path / "c" / "data" / f"{'a' * 16}-00000.safetensors").write_bytes(b"under way")
            return super().open_writer(name, nbytes)

    save({"w": sharded("w", torch.ones(2))}, AnotherBegins(tmp_path / "c"))
    assert (tmp_path / "c" / "data" / f"{'a' * 16}-00000.safetensors").exists()
    save({"w": sharded("w", torch.ones(2))}, tmp_path / "c")
    assert len(list((tmp_path / "c" / "data").iterdir())) == 1
