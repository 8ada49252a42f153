"""Requests and accidents that could end in silently wrong weights: answered exactly, or rejected by name."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
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
    StorageError,
    UnserializableError,
    load,
    load_plain_tensors,
    save,
)
from megackpt.comm import Group
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.geometry import Ints
from megackpt.planning import SavePlan
from megackpt.storage import LocalStore, MemoryStore
from megackpt.storage.file_writer import FileWriter
from megackpt.testing.world import SimulatedWorld


def whole(key: str, data: torch.Tensor, **fields: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **fields)


def test_a_chunk_stored_twice_does_not_hide_a_gap(tmp_path: Path) -> None:
    def first_half(group: Group) -> None:
        half = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))
        save({"w": half}, tmp_path / "c", validate_access_integrity=False, group=group)

    SimulatedWorld(2).run(first_half)
    with pytest.raises(FormatError, match="has no data for some elements"):
        load({"w": whole("w", torch.full((8,), -7.0))}, tmp_path / "c")


def test_only_what_lies_outside_of_the_stored_shape_is_padded(tmp_path: Path) -> None:
    half = ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, 0, 2))
    save({"w": half}, tmp_path / "c", validate_access_integrity=False)
    for numel in (8, 10):
        with pytest.raises(FormatError, match="has no data for some elements"):
            load({"w": whole("w", torch.zeros(numel), allow_shape_mismatch=True)}, tmp_path / "c")


def test_a_strategy_whose_rounds_fail_on_one_rank_is_an_error_of_all() -> None:
    class WithFailingRounds(NativeSaveStrategy):
        def rounds(self, plan: SavePlan, rank: int) -> list[Ints]:
            if rank == 1:
                raise UnserializableError("no such rows", key="w")
            return super().rounds(plan, rank)

    def run(group: Group) -> None:
        tensor = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, group.rank, 3))
        save({"w": tensor}, MemoryStore(), WithFailingRounds(), group=group)

    outcomes = SimulatedWorld(3).outcomes(run)
    assert {type(outcome) for outcome in outcomes} == {UnserializableError}
    assert {str(outcome) for outcome in outcomes} == {str(outcomes[1])}


def test_without_validation_ranks_that_disagree_all_learn_it(tmp_path: Path) -> None:
    def disagree(group: Group) -> None:
        tensor = whole("w", torch.ones(2 + group.rank), replica_id=group.rank)
        main = ShardedTensor.from_rank_offsets("v", torch.ones(2 + group.rank), (0, group.rank, 2))
        save({"w": tensor, "v": main}, tmp_path / "c", validate_access_integrity=False, group=group)

    for error in SimulatedWorld(2).outcomes(disagree):
        assert isinstance(error, MismatchError)
        assert "'v'" in str(error)


def test_ranks_that_open_different_checkpoints_raise_an_error(tmp_path: Path) -> None:
    for name, value in (("old", 1.0), ("new", 2.0)):
        save({"w": whole("w", torch.full((2,), value))}, tmp_path / name)

    def load_rank(group: Group) -> None:
        load({"w": whole("w", torch.zeros(2))}, tmp_path / ("old", "new")[group.rank], group=group)

    for error in SimulatedWorld(2).outcomes(load_rank):
        assert isinstance(error, MismatchError)
        assert f"{tmp_path}/old on rank 0 and {tmp_path}/new on rank 1" in str(error)


def test_a_checkpoint_that_was_saved_anew_while_ranks_opened_it_raises_an_error() -> None:
    stores = [MemoryStore("run"), MemoryStore("run")]
    for value, store in enumerate(stores):
        save({"w": whole("w", torch.full((2,), float(value)))}, store)

    def load_rank(group: Group) -> None:
        load({"w": whole("w", torch.zeros(2))}, stores[group.rank], group=group)

    for error in SimulatedWorld(2).outcomes(load_rank):
        assert isinstance(error, MismatchError)
        assert "run was saved anew while it was being opened" in str(error)


def test_what_is_excluded_without_data_is_left_out_not_invented(tmp_path: Path) -> None:
    save({"w": whole("w", torch.ones(2))}, tmp_path / "c")
    request = {"w": whole("w", torch.zeros(2)).without_data()}
    assert load(request, tmp_path / "c", options=LoadOptions(exclude=("w",))) == {}


def test_a_plain_value_is_declared_once_a_rank(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match=r"b: a rank declares the plain value 'k' twice"):
        save({"a": ReplicatedValue("k", 1), "b": ReplicatedValue("k", 2)}, tmp_path / "c")


def test_a_loaded_value_that_is_a_container_is_not_mixed_with_common_state(tmp_path: Path) -> None:
    save(
        {"args": {"a": 1, "b": 2}, "l": [1, 2], "e": [1], "o": ShardedObject("o", {"x": 1}, (1,), (0,))},
        tmp_path / "c",
    )
    request = {
        "args": LocalNonpersistentObject({"a": 5}),
        "l": LocalNonpersistentObject([9]),
        "e": LocalNonpersistentObject([]),
        "o": ShardedObject("o", None, (1,), (0,)),
    }
    assert load(request, tmp_path / "c") == {"args": {"a": 5}, "l": [9], "e": [], "o": {"x": 1}}


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
    save({"w": whole("w", torch.ones(4, dtype=torch.complex64))}, tmp_path / "c")
    with pytest.raises(DeclarationError, match=rf"'w': the tensor is .*{message}"):
        load({"w": whole("w", target)}, tmp_path / "c")


@pytest.mark.parametrize("data", [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()])
def test_a_tensor_without_elements_in_memory_cannot_be_saved(tmp_path: Path, data: torch.Tensor) -> None:
    with pytest.raises(DeclarationError, match=r"'w': the tensor is .*(to_empty|to_dense)"):
        save({"w": whole("w", data)}, tmp_path / "c")


def test_an_expanded_tensor_is_saved_as_what_it_looks_like(tmp_path: Path) -> None:
    save({"w": whole("w", torch.tensor([[1.0], [2.0]]).expand(2, 3))}, tmp_path / "c")
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("hide", [lambda e: (e,), lambda e: ((e,),), lambda e: deque([e]), lambda e: ([e],)])
def test_entities_inside_of_other_containers_raise_an_error_at_save_and_load(
    tmp_path: Path, hide: Any
) -> None:
    state = {"model": {"pair": hide(whole("w", torch.zeros(1)))}}
    with pytest.raises(DeclarationError, match=r"model\.pair: a ShardedTensor is inside of a (tuple|deque)"):
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
@pytest.mark.parametrize("value", [defaultdict(lambda: 1), "lone \udc80", {1, (2, frozenset({object()}))}])
def test_what_has_no_codec_raises_an_error_before_anything_is_written(
    tmp_path: Path, value: Any, validate: bool
) -> None:
    state = {"w": whole("w", torch.ones(2)), "args": {"x": [value]}}
    with pytest.raises(UnserializableError, match=r"^args\.x\[0\]"):
        save(state, tmp_path / "c", validate_access_integrity=validate)
    assert not (tmp_path / "c" / "data").exists()


def test_a_key_that_is_not_unicode_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeclarationError, match="without lone surrogates"):
        save({"w": whole("w\udc80", torch.zeros(1))}, tmp_path / "c")


def test_of_two_saves_to_one_path_the_later_commit_does_not_point_to_what_is_gone(tmp_path: Path) -> None:
    class SecondJobFinishesFirst(LocalStore):
        def write(self, name: str, data: bytes) -> None:
            if name.startswith("common-"):
                for path in (tmp_path / "c" / "data").iterdir():
                    path.unlink()  # as the clean-up of a job does that does not know this save
                save({"w": whole("w", torch.full((2,), 2.0))}, tmp_path / "c")
            super().write(name, data)

    with pytest.raises(StorageError, match=r"is gone\. Another job saves to the same directory"):
        save({"w": whole("w", torch.ones(2))}, SecondJobFinishesFirst(tmp_path / "c"))
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [2.0, 2.0]


def test_a_save_leaves_the_files_of_saves_that_began_later(tmp_path: Path) -> None:
    class AnotherBegins(LocalStore):
        def open_writer(self, name: str, nbytes: int) -> FileWriter:
            if name.startswith("index-"):
                (tmp_path / "c" / "data" / f"{'a' * 16}-00000.safetensors").write_bytes(b"under way")
            return super().open_writer(name, nbytes)

    save({"w": whole("w", torch.ones(2))}, AnotherBegins(tmp_path / "c"))
    assert (tmp_path / "c" / "data" / f"{'a' * 16}-00000.safetensors").exists()
    save({"w": whole("w", torch.ones(2))}, tmp_path / "c")
    assert len(list((tmp_path / "c" / "data").iterdir())) == 1
