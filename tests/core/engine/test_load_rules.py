"""What a load does with targets: their dtypes, devices, layouts, targets of several keys, and exchanges."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint import CheckpointException

import megackpt
from megackpt import (
    CheckpointError,
    DeclarationError,
    KeyRule,
    LoadOptions,
    MismatchError,
    MissingKeyError,
    Policy,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
    load,
    load_plain_tensors,
    load_with_report,
    save,
)
from megackpt.codec.arrays import has_memory
from megackpt.comm import Group
from megackpt.comm.process_groups import DeviceGroup
from megackpt.contrib.dcp import MegackptStorageReader
from megackpt.engine.loading.exchange import RankRequest
from megackpt.engine.loading.shared_targets import sharing
from megackpt.entities.describe import describe, torch_dtype
from megackpt.errors import UnsupportedError
from megackpt.run import check_is_distributed_checkpoint, remove_sharded_tensors
from megackpt.storage import LocalStore, MemoryStore
from megackpt.testing.cached_disk import Loss
from megackpt.testing.crash_store import CrashMachine, Moment, Stopped
from megackpt.testing.world import SimulatedWorld
from tests.core.formats.test_torch_files import fake_rank
from tests.support.checkpoints import SAVED_FORMATS
from tests.support.dcp_alone import ALONE
from tests.support.states import filled, freed, sharded
from tests.support.worlds import error_of_all, loading, saving


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with the keys a, b and, an object, o."""
    arrays = {"a": filled(1, 4, key="a"), "b": filled(1, 2, key="b")}
    save({**arrays, "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path / "c")
    return tmp_path / "c"


def request() -> dict[str, Any]:
    """Ask for a and for x, which is not there; not for b and o, which are."""
    return {"a": sharded("a", torch.zeros(4)), "x": sharded("x", torch.zeros(1))}


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_unexpected", "raise_all"])
def test_an_unexpected_key_is_an_error_and_nothing_is_read(checkpoint: Path, strict: str) -> None:
    asked = request()
    with pytest.raises(MissingKeyError, match="'x'"):
        load(asked, checkpoint, strict=strict)  # type: ignore[call-overload]
    assert asked["a"].data.sum() == 0


@pytest.mark.parametrize("strict", ["log_unexpected", "log_all", "ignore_all"])
def test_an_unexpected_key_is_left_out_and_logged_by_the_mode(
    checkpoint: Path, strict: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load(request(), checkpoint, strict=strict)  # type: ignore[call-overload]
    assert set(loaded) == {"a"}
    assert loaded["a"].sum() == 4
    message = "\n".join(r.getMessage() for r in caplog.records)
    assert ("'x'" in message) == strict.startswith("log")
    assert ("'b'" in message and "'o'" in message) == (strict == "log_all")


def test_return_modes_return_missing_and_unexpected_keys(checkpoint: Path) -> None:
    state, missing, unexpected = load(request(), checkpoint, strict=StrictHandling.RETURN_ALL)
    assert (set(state), missing, unexpected) == ({"a"}, {"b", "o"}, {"x"})
    state, missing, unexpected = load(request(), checkpoint, strict="return_unexpected")
    assert (missing, unexpected) == (set(), {"x"})


def test_raise_all_names_keys_that_no_rank_asks_for(checkpoint: Path) -> None:
    with pytest.raises(MissingKeyError, match=r"holds 2 keys that no rank asks for:\n  'b'\n  'o'"):
        load({"a": sharded("a", torch.zeros(4))}, checkpoint, strict="raise_all")
    everything: dict[str, Any] = {"a": sharded("a", torch.zeros(4)), "b": sharded("b", torch.zeros(2))}
    everything["o"] = ShardedObject("o", None, (1,), (0,))
    assert load(everything, checkpoint, strict="raise_all")["o"] == 1


def test_a_key_is_missing_only_if_no_rank_at_all_asks_for_it(checkpoint: Path) -> None:
    def request_of(rank: int) -> dict[str, Any]:
        return {"t": sharded("b", torch.zeros(2)) if rank else sharded("a", torch.zeros(4))}

    results = SimulatedWorld(2).run(loading(request_of, checkpoint, strict="return_all"))
    assert [missing for _, missing, _ in results] == [{"o"}, {"o"}]


def test_an_unknown_mode_raises_an_error_that_lists_the_modes(checkpoint: Path) -> None:
    message = "strict='lenient' is not a mode. Give one of 'assume_ok_unexpected'"
    with pytest.raises(DeclarationError, match=message):
        load({}, checkpoint, strict="lenient")  # type: ignore[call-overload]


def test_a_factory_or_layout_with_an_unexpected_part_is_left_out_as_a_whole(checkpoint: Path) -> None:
    factory = ShardedTensorFactory(
        "f",
        torch.zeros(5),
        lambda *_: [sharded("a", torch.zeros(4)), sharded("y", torch.zeros(1))],
        torch.cat,
    )
    layout = ShardedLayout.split("z", torch.zeros(4, 2), 0, {"gate": 2, "up": 2})
    asked = {"f": factory, "l": layout, "a": sharded("a", torch.zeros(4))}
    assert set(load(asked, checkpoint, strict="ignore_all")) == {"a"}


def test_rules_decide_per_key_before_the_mode(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = KeyRule(keys="x*", unexpected=Policy.WARN), KeyRule(keys="b", missing=Policy.ERROR)
    options = LoadOptions(rules=rules)
    with caplog.at_level(logging.WARNING), pytest.raises(MissingKeyError, match=r"no rank asks for:\n  'b'"):
        load(request(), checkpoint, options=options)
    assert "'x'" in caplog.text
    asked = request() | {"b": sharded("b", torch.zeros(2))}
    assert set(load(asked, checkpoint, options=options)) == {"a", "b"}


def test_a_cast_is_an_error_unless_a_rule_allows_it(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"a": sharded("a", torch.zeros(4, dtype=torch.bfloat16))}
    with pytest.raises(MismatchError, match=r"'a': stored as float32 \(4,\), asked for as bfloat16"):
        load(asked, checkpoint)
    assert asked["a"].data.sum() == 0
    options = LoadOptions(rules=(KeyRule(keys="*", cast=Policy.WARN),))
    with caplog.at_level(logging.WARNING):
        assert load(asked, checkpoint, options=options)["a"].tolist() == [1.0] * 4
    assert "'a': stored as float32 (4,), asked for as bfloat16 (4,)" in caplog.text


def test_casts_convert_values_also_of_resharded_and_flat_chunks(tmp_path: Path) -> None:
    array = torch.arange(60, dtype=torch.float64).reshape(6, 10) / 7
    save({"w": sharded("w", array)}, tmp_path / "c")
    options = LoadOptions(rules=(KeyRule(keys="w", cast=Policy.IGNORE),))
    columns = torch.zeros(6, 5, dtype=torch.float32)
    flat = torch.zeros(17, dtype=torch.float16)
    load({"w": sharded("w", columns, (1, 1, 2))}, tmp_path / "c", options=options)
    assert torch.equal(columns, array[:, 5:].float())
    part = ShardedTensor.from_rank_offsets_flat("w", flat, (6, 10), flattened_range=slice(3, 20))
    load({"w": part}, tmp_path / "c", options=options)
    assert torch.equal(flat, array.reshape(-1)[3:20].half())


def test_shapes_may_differ_by_flag_or_by_rule_padded_with_zeros_or_cut_per_axis(tmp_path: Path) -> None:
    array = torch.arange(1.0, 13.0).reshape(3, 4)
    save({"w": sharded("w", array)}, tmp_path / "c")
    with pytest.raises(MismatchError, match="allow_shape_mismatch"):
        load({"w": sharded("w", torch.zeros(4, 3))}, tmp_path / "c")
    expected = torch.zeros(4, 3)
    expected[:3] = array[:, :3]
    rule = LoadOptions(rules=(KeyRule(keys="w", padded=Policy.IGNORE, cut=Policy.IGNORE),))
    by_rule, by_flag = torch.full((4, 3), 9.0), torch.full((4, 3), 9.0)
    load({"w": sharded("w", by_rule)}, tmp_path / "c", options=rule)
    load({"w": sharded("w", by_flag, allow_shape_mismatch=True)}, tmp_path / "c")
    assert torch.equal(by_rule, expected)
    assert torch.equal(by_flag, expected)
    flat = torch.full((7,), 9.0)
    shard = ShardedTensor.from_rank_offsets_flat(
        "w", flat, (4, 3), flattened_range=slice(4, 11), allow_shape_mismatch=True
    )
    load({"w": shard}, tmp_path / "c")
    assert torch.equal(flat, expected.reshape(-1)[4:11])


def test_resharding_can_be_made_an_error_or_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": sharded("w", torch.ones(4))}, tmp_path / "c")
    part = {"w": sharded("w", torch.zeros(2), (0, 1, 2))}
    rules = (KeyRule(keys="*", resharded=Policy.ERROR),)
    load({"w": sharded("w", torch.zeros(4))}, tmp_path / "c", options=LoadOptions(rules=rules))
    with pytest.raises(MismatchError, match=r"saved at another layout(.|\n)*'w'(.|\n)*Load at the layout"):
        load(part, tmp_path / "c", options=LoadOptions(rules=rules))
    warn = LoadOptions(rules=(KeyRule(keys="*", resharded=Policy.WARN),))
    with caplog.at_level(logging.WARNING):
        assert load(part, tmp_path / "c", options=warn)["w"].sum() == 2
    assert "saved at another layout" in caplog.text


def test_stored_keys_can_be_asked_for_by_other_names(tmp_path: Path) -> None:
    def state(name: str) -> dict[str, Any]:
        return {
            "w": filled(name == "old", 2, key=f"{name}.w"),
            "o": ShardedObject(f"{name}.rng", name, (1,), (0,)),
        }

    save(state("old"), tmp_path)
    loaded = load(state("new"), tmp_path, options=LoadOptions(rename={"old.*": "new.*"}))
    assert loaded["w"].sum() == 2
    assert loaded["o"] == "old"


def test_bad_renames_raise_an_error(tmp_path: Path) -> None:
    save({"a": sharded("a.x", torch.ones(1)), "b": sharded("b.x", torch.ones(1))}, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"'a.x' and 'b.x' the same name 'z.x'"):
        load({}, tmp_path / "c", options=LoadOptions(rename={"a.*": "z.*", "b.*": "z.*"}))
    with pytest.raises(DeclarationError, match="1 and 0 stars"):
        load({}, tmp_path / "c", options=LoadOptions(rename={"a.*": "z"}))


def test_excluded_keys_keep_their_data_and_need_not_be_in_the_checkpoint(checkpoint: Path) -> None:
    asked = request() | {"b": sharded("b", torch.full((2,), 7.0))}
    loaded = load(asked, checkpoint, options=LoadOptions(exclude=("b", "x")))
    assert loaded["a"].sum() == 4
    assert loaded["b"].tolist() == [7.0, 7.0]
    assert loaded["x"].tolist() == [0.0]


def test_the_report_lists_what_was_done_with_bytes(tmp_path: Path) -> None:
    stored = {key: filled(1, 4, key=key) for key in ("same", "cast", "small", "large")}
    stored["unasked"] = filled(1, 1, key="unasked")
    save({**stored, "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path / "c")
    asked = {
        "same": sharded("same", torch.zeros(4)),
        "cast": sharded("cast", torch.zeros(4, dtype=torch.float16)),
        "small": sharded("small", torch.zeros(6), allow_shape_mismatch=True),
        "large": sharded("large", torch.zeros(3), allow_shape_mismatch=True),
        "gone": sharded("gone", torch.zeros(1)),
        "left": sharded("left", torch.zeros(1)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }
    options = LoadOptions(rules=(KeyRule(keys="cast", cast=Policy.IGNORE),), exclude=("left",))
    state, report = load_with_report(asked, tmp_path / "c", strict="log_all", options=options)
    assert set(state) == {"same", "cast", "small", "large", "left", "o"}
    assert set(report.loaded) == {"same", "cast", "small", "large", "o/shard_0_1"}
    assert [a.key for a in report.cast] == ["cast"]
    assert [(a.key, a.padded_nbytes) for a in report.padded] == [("small", 8)]
    assert [a.key for a in report.cut] == ["large"]
    assert {a.key for a in report.resharded} == {"small", "large"}
    assert (report.missing, report.unexpected, report.excluded) == ({"unasked"}, {"gone"}, {"left"})
    assert report.nbytes == 16 + 8 + 24 + 12
    text = str(report)
    assert "loaded 4 arrays (60 bytes on this rank), 1 objects" in text
    assert "'small': stored as float32 (4,), loaded as float32 (6,), 8 bytes of 0" in text


@pytest.mark.parametrize("strategy", SAVED_FORMATS, ids=str)
def test_a_machine_that_stops_while_arrays_are_removed_leaves_all_or_the_rest(
    strategy: tuple[str, int], tmp_path: Path
) -> None:
    state = {"w": sharded("model.w", torch.arange(9.0)), "m": sharded("optimizer.m", torch.ones(9))}
    save(state, tmp_path, strategy)
    before = {name: LocalStore(tmp_path).read(name, max_bytes=10**6) for name in LocalStore(tmp_path).names()}
    machine = CrashMachine(before)
    remove_sharded_tensors(machine.store(rank=0), "optimizer.")
    seen = set()
    for index in range(machine.passed[0]):
        machine = CrashMachine(before, stop_at=Moment(rank=0, index=index))
        with pytest.raises(Stopped):
            remove_sharded_tensors(machine.store(rank=0), "optimizer.")
        for loss in Loss:
            loaded = load_plain_tensors(machine.restarted(loss).store(rank=0))
            assert torch.equal(loaded["model.w"], torch.arange(9.0)), (index, loss)
            seen.add(tuple(loaded))
    assert seen == {("model.w",), ("model.w", "optimizer.m")}


def test_arrays_can_be_taken_out_of_a_checkpoint_and_the_rest_stays_loadable(tmp_path: Path) -> None:
    def state_of(rank: int) -> dict[str, Any]:
        if rank == 2:
            return {"x": sharded("optimizer.x", torch.ones(3))}
        half = (0, rank, 2)
        values = torch.full((70_000,), 1.0 + rank)
        return {"w": sharded("model.w", values, half), "m": sharded("optimizer.m", torch.ones(3), half)}

    SimulatedWorld(3).run(saving(state_of, tmp_path / "c"))
    assert len(list((tmp_path / "c" / "data").iterdir())) == 3
    for _ in range(2):  # the second time there is nothing left to remove
        remove_sharded_tensors(tmp_path / "c", "optimizer.")
        loaded = load_plain_tensors(tmp_path / "c")
        assert list(loaded) == ["model.w"]
        assert loaded["model.w"].unique().tolist() == [1.0, 2.0]
        assert len(list((tmp_path / "c" / "data").iterdir())) == 2
        assert len(list((tmp_path / "c").glob("index-*"))) == 1
    save({}, tmp_path / "c")
    assert not list((tmp_path / "c" / "data").iterdir())
    assert check_is_distributed_checkpoint(tmp_path / "c")
    assert not check_is_distributed_checkpoint(tmp_path)


class Marked(torch.Tensor):
    """A tensor of a class of the user's own."""


@pytest.fixture
def module_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a module under `model`: an array `model.w`, and common state `model.mean`."""
    save({"model": {"w": sharded("model.w", torch.ones(4)), "mean": torch.full((2,), 5.0)}}, tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("strict", ["raise_unexpected", "raise_all"])
def test_a_plain_tensor_for_whose_path_there_is_nothing_is_an_unexpected_key(
    module_checkpoint: Path, strict: str
) -> None:
    with pytest.raises(MissingKeyError, match=r"'w' \(the checkpoint has|'w'") as caught:
        load({"w": torch.zeros(4), "step": 1}, module_checkpoint, strict=strict)  # type: ignore[call-overload]
    assert caught.value.key == "w"
    state, _, unexpected = load({"w": torch.zeros(4), "step": 1}, module_checkpoint, strict="return_all")
    assert unexpected == {"w"}
    assert "w" not in state


def test_a_plain_tensor_that_a_number_answers_keeps_its_value_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"step": 3, "groups": [{"lr": 0.5}], "weight": torch.ones(2)}, tmp_path)
    step, lr = torch.tensor(0), torch.tensor(0.25)
    loaded = load({"step": step, "groups": [{"lr": lr}], "weight": torch.zeros(2)}, tmp_path)
    assert (loaded["step"], loaded["groups"], step.item(), lr.item()) == (3, [{"lr": 0.5}], 0, 0.25)
    assert "'groups.0.lr': stored as float\n  'step': stored as int" in caplog.text
    assert "weight" not in caplog.text


def test_the_default_mode_warns_of_plain_tensors_without_a_value_and_rules_decide_otherwise(
    module_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        asked = {"w": torch.zeros(4), "model": {"w": torch.zeros(4)}}
        assert set(load(asked, module_checkpoint)) == {"model"}
    assert "'w'" in caplog.text
    error = LoadOptions(rules=(KeyRule(keys="w", unexpected=Policy.ERROR),))
    with pytest.raises(MissingKeyError, match="'w'"):
        load({"w": torch.zeros(4)}, module_checkpoint, options=error)
    with pytest.raises(MissingKeyError, match="'w'"):  # an entity asks for the key as well
        load({"w": torch.zeros(4), "x": sharded("w", torch.zeros(4))}, module_checkpoint)
    kept = torch.full((4,), 7.0)
    options = LoadOptions(exclude=("w",))
    assert load({"w": kept}, module_checkpoint, options=options, strict="raise_unexpected")["w"] is kept
    caplog.clear()
    ignored = LoadOptions(rules=(KeyRule(keys="w", unexpected=Policy.IGNORE),))
    assert set(load(asked, module_checkpoint, options=ignored)) == {"model"}
    assert not caplog.messages


def test_tensors_of_common_state_are_filled_in_place_where_they_have_memory_of_their_own(
    module_checkpoint: Path,
) -> None:
    mean = torch.zeros(2).as_subclass(Marked)
    weight = torch.zeros(4).as_subclass(Marked)
    loaded = load({"model": {"w": weight, "mean": mean}}, module_checkpoint, strict="raise_all")
    assert loaded["model"]["mean"] is mean
    assert mean.tolist() == [5.0, 5.0]
    assert weight.tolist() == [1.0] * 4
    for other in (torch.zeros(1).expand(2), torch.zeros(2, device="meta"), freed(torch.ones(2))):
        loaded = load({"model": {"mean": other, "w": torch.zeros(4)}}, module_checkpoint, strict="raise_all")
        assert loaded["model"]["mean"].tolist() == [5.0, 5.0]
        assert other.device.type == "meta" or not has_memory(other) or not other.any()


VALUES = torch.arange(12.0).reshape(4, 3)
HOST = LoadOptions(load_on_device=False)


def test_what_is_on_the_meta_device_gets_host_memory_and_what_has_memory_is_filled(tmp_path: Path) -> None:
    def laid_out(data: torch.Tensor) -> ShardedLayout:
        return ShardedLayout.split("layout", data, 0, {"up": 2, "gate": 2})

    save({"w": sharded("w", VALUES), "layout": laid_out(VALUES)}, tmp_path)
    target = torch.zeros(4, 3)
    asked = {"w": sharded("w", target), "layout": laid_out(torch.empty(4, 3, device="meta"))}
    loaded = load(asked, tmp_path, options=HOST)
    assert loaded["w"] is target
    assert torch.equal(target, VALUES)
    assert torch.equal(loaded["layout"], VALUES)
    model = torch.nn.Linear(3, 4, bias=False, device="meta")
    asked = {"weight": sharded("w", model.weight)}
    loaded = load(asked, tmp_path, options=HOST)
    assert model.weight.is_meta
    model.load_state_dict(loaded, assign=True)
    assert torch.equal(model.weight, VALUES)
    message = r"meta device.*to_empty.*assign=True.*LoadOptions\(load_on_device=False\)"
    with pytest.raises(DeclarationError, match=message):
        load({"weight": sharded("w", torch.empty(4, 3, device="meta"))}, tmp_path)


def without_bytes() -> dict[str, torch.Tensor]:
    rows: list[torch.Tensor] = []
    torch.func.vmap(lambda row: rows.append(row) or row)(torch.ones(2, 2))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    return {
        "freed": freed(torch.ones(2)),
        "half of it freed": freed(torch.ones(2), nbytes=4),
        "a view of freed memory": freed(torch.ones(4)[2:]),
        "in a transformation": rows[0],
        "functional": torch._to_functional_tensor(torch.ones(2)),
        "fake": fake,
    }


@pytest.mark.parametrize("kind", without_bytes())
@pytest.mark.parametrize("backend", ["megackpt", "torch_dist", "zarr"])
def test_a_tensor_whose_memory_is_not_there_is_neither_saved_nor_filled(kind: str, backend: str) -> None:
    tensor = without_bytes()[kind]
    for state in ({"w": sharded("w", tensor)}, {"w": tensor}, {"w": (tensor,)}):
        with pytest.raises(CheckpointError):
            save(state, store := MemoryStore(), backend)
        assert not store.names()
    save({"w": sharded("w", torch.ones(2))}, store, backend)
    with pytest.raises(DeclarationError, match=r"'w': the memory of the \w+ is freed or out of reach"):
        load({"w": sharded("w", tensor)}, store)


MODES: tuple[Any, ...] = ("direct", "all_to_all", "two_stage")


def stored(*values: torch.Tensor) -> MemoryStore:
    store = MemoryStore()
    save({key: sharded(key, value) for key, value in zip("abcdef", values, strict=False)}, store)
    return store


@pytest.mark.parametrize("mode", MODES)
def test_two_keys_into_one_tensor_raise_an_error_on_every_rank_where_their_values_differ(mode: Any) -> None:
    store = stored(torch.ones(4), torch.zeros(4), torch.ones(4))

    def into_one(group: Group, second: str) -> torch.Tensor:
        target = torch.full((4,), -7.0)
        other = target if group.rank == 1 else torch.empty(4)
        asked = {"first": sharded("a", target), "second": sharded(second, other)}
        loaded = load(asked, store, options=LoadOptions(exchange=mode), group=group)
        assert loaded["first"] is target
        return target

    error = error_of_all(2, lambda group: into_one(group, "b"), MismatchError)
    assert "'a' and 'b' were loaded into the same memory" in str(error)
    for target in SimulatedWorld(2).run(lambda group: into_one(group, "c")):
        assert target.tolist() == [1.0] * 4  # a tied weight that was saved under both names


def test_views_that_overlap_are_compared_element_by_element() -> None:
    store = stored(torch.tensor([0.0, 1, 2, 3]), torch.tensor([2.0, 3, 4]), torch.tensor([9.0, 3, 4]))
    buffer = torch.full((5,), -7.0)
    load({"a": sharded("a", buffer[:4]), "b": sharded("b", buffer[2:])}, store)
    assert buffer.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(MismatchError, match="'a' and 'c' were loaded into the same memory") as raised:
        load({"a": sharded("a", buffer[:4]), "c": sharded("c", buffer[2:])}, store)
    assert raised.value.key == "a"


def test_boxes_of_one_key_that_share_memory_raise_an_error() -> None:
    store = stored(torch.arange(8.0))
    target = torch.zeros(4)
    parts = [sharded("a", target, (0, rank, 2)) for rank in (0, 1)]
    with pytest.raises(MismatchError, match="'a' and 'a' were loaded into the same memory"):
        load({"halves": parts}, store)
    load({"once": parts[0], "again": parts[0]}, store)
    assert target.tolist() == [0, 1, 2, 3]


def test_plain_tensors_of_common_state_count_too() -> None:
    store = MemoryStore()
    save(
        {"x": torch.ones(3), "y": torch.zeros(3), "z": torch.ones(3), "a": sharded("a", torch.ones(3))}, store
    )
    target = torch.full((3,), -7.0)
    with pytest.raises(MismatchError, match="'x' and 'y' were loaded into the same memory"):
        load({"x": target, "y": target}, store)
    with pytest.raises(MismatchError, match="'a' and 'y' were loaded into the same memory"):
        load({"y": target, "a": sharded("a", target)}, store)
    load({"x": target, "z": target, "a": sharded("a", target)}, store)
    assert target.tolist() == [1.0] * 3
    load({"x": target, "y": target[:1].expand(3)}, store)  # its elements share memory: not filled in place
    assert target.tolist() == [1.0] * 3


def test_nans_are_equal_to_themselves_and_grad_does_not_matter() -> None:
    store = stored(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    weight = torch.nn.Parameter(torch.zeros(2))
    load({"a": sharded("a", weight), "b": sharded("b", weight)}, store)
    assert weight[1] == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_dcp_load_into_one_tensor_raises_an_error(tmp_path: Path) -> None:
    save({key: sharded(key, torch.full((2,), float(i))) for i, key in enumerate("ab")}, tmp_path)
    target = torch.zeros(2)
    with pytest.raises(CheckpointException, match="'a' and 'b' were loaded into the same memory"):
        dcp.load({"a": target, "b": target}, storage_reader=MegackptStorageReader(tmp_path), **ALONE)


def test_what_does_not_share_memory_is_read_into_as_it_is() -> None:
    flat = torch.zeros(64)
    apart = [flat[:16], flat[16:32], flat[32:32], flat[:0]]
    fused = flat[32:].view(4, 2, 4)  # columns of two weights, one next to the other in each row
    apart += [fused[:, 0], fused[:, 1]]
    assert sharing(apart) == {}
    assert sharing([*apart, flat[15:17]]) == {0: 6, 6: 0, 1: 6}
    assert sharing([fused[:, 0], fused[:, :, 3]]) == {0: 1, 1: 0}
    assert sharing([flat, flat.view(torch.int32), torch.empty(3, device="meta")]) == {0: 1, 1: 0}
    twice = torch.from_numpy(flat.numpy())  # another storage, the same memory
    assert sharing([flat[:3], twice[2:]]) == {0: 1, 1: 0}


def test_many_targets_are_looked_through_in_time() -> None:
    flat = torch.zeros(40_000)
    began = time.process_time()
    assert sharing(list(flat.split(4))) == {}
    assert len(sharing([flat, *flat.split(4)])) == 10_001
    assert time.process_time() - began < 2


def rank_request(*tensors: ShardedTensor) -> RankRequest:
    return RankRequest(describe(tensors, rank=0), tensors, [])


def test_the_device_of_a_request_is_the_first_that_is_not_the_host() -> None:
    host = sharded("h", torch.zeros(3))
    meta = sharded("m", torch.zeros(3, device="meta"))
    without = ShardedTensor("n", None, torch.float32, (3,), (3,), (0,))
    assert rank_request().device == torch.device("cpu")
    assert rank_request(host, without).device == torch.device("cpu")
    assert rank_request(without, host, meta).device == torch.device("meta")


def test_tensors_on_the_host_never_use_the_backend_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(self: DeviceGroup, data: torch.Tensor, *, root: int) -> torch.Tensor:
        raise AssertionError("data went to a device")

    monkeypatch.setattr(DeviceGroup, "broadcast", broadcast)
    store = MemoryStore()
    whole = torch.arange(1000.0)
    save({"w": sharded("w", whole)}, store)

    def request_of(rank: int) -> dict[str, Any]:
        return {"w": sharded("w", torch.zeros(1000), replica_id=rank)}

    options = LoadOptions(exchange="two_stage", cpu_transfer=False)
    with fake_rank(0, 2):
        results = SimulatedWorld(2).run(loading(request_of, store, options=options))
    assert all(torch.equal(loaded["w"], whole) for loaded in results)


NEW_DTYPE = "float8_e8m0fnu"


@pytest.mark.skipif(not hasattr(torch, NEW_DTYPE), reason=f"torch {torch.__version__} has no {NEW_DTYPE}")
def test_a_dtype_that_this_torch_lacks_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"scale": torch.ones(4, dtype=torch.uint8).view(getattr(torch, NEW_DTYPE)), "w": torch.ones(2)}
    megackpt.save(state, tmp_path / "c")
    torch_dtype.cache_clear()
    monkeypatch.delattr(torch, NEW_DTYPE)
    uses: list[Callable[[], object]] = [
        lambda: megackpt.load({}, tmp_path / "c"),
        lambda: megackpt.load_plain_tensors(tmp_path / "c"),
        lambda: megackpt.load_common_state_dict(tmp_path / "c"),
        lambda: megackpt.convert(tmp_path / "c", tmp_path / "new", "torch_dist"),
        lambda: megackpt.diff(tmp_path / "c", tmp_path / "c", read_all=True),
    ]
    for use in uses:
        with pytest.raises(UnsupportedError, match=f"stored as {NEW_DTYPE}, which torch .* does not have"):
            use()
    assert {array.key for array in megackpt.inspect(tmp_path / "c").arrays} == {"scale", "w"}
    torch_dtype.cache_clear()
