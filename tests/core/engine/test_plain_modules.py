"""Tensors of common state as arrays: written by all ranks, compared, and loaded to their places."""

from __future__ import annotations

import ast
import json
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import megackpt
from megackpt import (
    Checkpointer,
    FormatError,
    IntegrityError,
    KeyRule,
    LoadOptions,
    MismatchError,
    MissingKeyError,
    PerRankValue,
    Policy,
    SaveOptions,
    StrictHandling,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    load_tensors_metadata,
    load_with_report,
    save,
)
from megackpt.cli import main
from megackpt.comm import Group
from megackpt.contrib.dcp import MegackptStorageReader
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.loading.common_request import CommonRequest
from megackpt.errors import CommonStateError
from megackpt.run import remove_sharded_tensors
from megackpt.storage import MemoryStore, opened_store
from megackpt.testing.world import SimulatedWorld
from tests.support.checkpoints import flip
from tests.support.dcp_alone import ALONE
from tests.support.pasted import pasted
from tests.support.states import sharded
from tests.support.worlds import Run, error_of_all, loading, saving

ARRAYS = SaveOptions(plain_tensors="arrays")


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("options", [SaveOptions(), SaveOptions(plain_tensors="common")])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_module_and_its_optimizer_come_back(tmp_path: Path, options: SaveOptions, ranks: int) -> None:
    saved = state_of(*trained())
    SimulatedWorld(ranks).run(saving(lambda rank: saved, tmp_path / "c", options=options))
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5))
    optimizer = torch.optim.Adam(model.parameters())
    loaded = load(state_of(model, optimizer), tmp_path / "c", strict="raise_all")
    assert loaded["model"]["0.weight"].data_ptr() == model.state_dict()["0.weight"].data_ptr()  # in place
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert same(state_of(model, optimizer), saved)
    load_all = loading(lambda rank: {}, tmp_path / "c", strict="raise_all")
    on_ranks = chain.from_iterable(SimulatedWorld(n).run(load_all) for n in (1, 2, 5))
    for whole in (*on_ranks, load_common_state_dict(tmp_path / "c")):
        assert same(whole, saved)
        assert type(whole["model"]) is OrderedDict


def test_arrays_are_written_by_all_ranks_and_small_scalars_stay(tmp_path: Path) -> None:
    saved = {"model": {f"w{i}": torch.arange(25_000.0) for i in range(8)} | {"n": torch.tensor(7)}}
    SimulatedWorld(4).run(saving(lambda rank: saved, tmp_path / "c", options=ARRAYS))
    assert set(load_plain_tensors(tmp_path / "c")) == {f"model.w{i}" for i in range(8)} | {"model.n"}
    sizes = [file.stat().st_size for file in sorted((tmp_path / "c" / "data").iterdir())]
    assert len(sizes) == 4
    assert max(sizes) < 800_000 / 3
    (common,) = (tmp_path / "c").glob("common-*.json")
    stored = json.loads(common.read_text())["state_dict"]["model"]
    assert stored["w7"] == {"$array": "model.w7"}
    assert stored["n"] == {"$tensor": 0}


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
@pytest.mark.parametrize("shape", [(), (0,), (4,)])
def test_another_dtype_or_shape_is_an_error_with_the_rule_that_allows_it(
    tmp_path: Path, plain_tensors: Any, shape: tuple[int, ...]
) -> None:
    options = SaveOptions(plain_tensors=plain_tensors)
    save({"a": torch.ones(shape), "b": torch.ones(shape)}, tmp_path / "c", options=options)
    half, meta = torch.zeros(shape, dtype=torch.float16), torch.zeros(shape, device="meta")
    with pytest.raises(MismatchError, match=r"(?s)'a': stored as .*KeyRule\(keys='a', cast=Policy.WARN\)"):
        load({"a": half, "b": meta}, tmp_path / "c")
    assert not half.any()
    rules = LoadOptions(rules=(KeyRule(keys="a", cast=Policy.WARN),))
    loaded = load({"a": half, "b": meta}, tmp_path / "c", options=rules)
    assert loaded["a"] is half
    assert torch.equal(half, torch.ones(shape).half())
    assert torch.equal(loaded["b"], torch.ones(shape))
    other = torch.zeros((*shape, 2))
    with pytest.raises(MismatchError, match="'a': stored as float32"):
        load({"a": other}, tmp_path / "c")


def bn(rank: int) -> dict[str, Any]:
    return {"model": OrderedDict({"w": torch.ones(3), "bn.running_mean": torch.full((2,), float(rank))})}


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
def test_buffers_that_differ_are_named_and_rank_0s_can_be_taken(tmp_path: Path, plain_tensors: Any) -> None:
    def saving_with(*globs: str) -> Callable[[Group], None]:
        options = SaveOptions(plain_tensors=plain_tensors, rank0_values=globs)
        return saving(bn, tmp_path, options=options)

    error = error_of_all(3, saving_with(), CommonStateError)
    assert "SaveOptions(rank0_values=(" in str(error)
    if plain_tensors == "arrays":
        assert "\"model['bn.running_mean']\" on rank(s) 1, 2" in str(error)
        assert "'w'" not in str(error)
    SimulatedWorld(3).run(saving_with("model.*.running_*"))
    assert load({}, tmp_path)["model"]["bn.running_mean"].tolist() == [0.0, 0.0]
    error_of_all(3, saving_with("model.other.*"), CommonStateError)  # only what the globs name may differ


def norms(rank: int) -> nn.Module:
    """Return a module whose parameters are equal on all ranks, and whose running statistics are not."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2, affine=False)))
    for param in model.parameters():  # ranks are threads with one generator
        nn.init.constant_(param, 0.5)
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)))
    return model


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
def test_running_statistics_of_a_module_that_differ_are_rank_0s_with_one_warning(
    tmp_path: Path, plain_tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = SaveOptions(plain_tensors=plain_tensors)

    def save_with(options: SaveOptions) -> None:
        make = saving(lambda rank: {"nets": [norms(rank).state_dict()]}, tmp_path / "c", options=options)
        SimulatedWorld(3).run(make)

    save_with(options)
    (warning,) = caplog.messages
    assert "rank 0's are stored:\n  \"nets[0]['1.running_mean']\"" in warning
    stored = load({}, tmp_path / "c")["nets"][0]
    assert {name: t.tolist() for name, t in stored.items()} == {
        name: t.tolist() for name, t in norms(0).state_dict().items()
    }
    caplog.clear()
    save_with(replace(options, rank0_values=pasted(warning).rank0_values))
    assert not caplog.messages


def test_a_run_is_warned_once_of_running_statistics_that_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(2)  # its ranks keep plans, as a Checkpointer does
    for _ in range(3):
        assert run.save(lambda rank: {"net": norms(rank).state_dict()}) is None
    assert [text.startswith("Running statistics of norms differ") for text in caplog.messages] == [True]


def test_parameters_and_buffers_of_other_names_that_differ_stay_an_error(tmp_path: Path) -> None:
    def state_of(rank: int, name: str) -> dict[str, Any]:
        model = norms(0)
        model.register_buffer("scale", torch.zeros(1))
        with torch.no_grad():
            model.state_dict()[name].add_(rank)
        return {"model": model.state_dict()}

    for name in ("1.weight", "0.bias", "scale"):
        error = error_of_all(2, saving(partial(state_of, name=name), tmp_path), CommonStateError)
        assert re.search(rf"model.*{re.escape(name)}.* on rank\(s\) 1", str(error))


@pytest.mark.parametrize("plain_tensors", ["arrays", "common"])
@pytest.mark.parametrize("layers", [2, 40])
def test_the_option_of_the_error_works_when_it_is_pasted(
    tmp_path: Path, plain_tensors: Any, layers: int
) -> None:
    """Paths in dicts, lists and namespaces; where they are many, globs."""

    def state(rank: int) -> dict[str, Any]:
        buffers = {f"{i}.bn.running_mean": torch.full((2,), float(rank)) for i in range(layers)}
        return {
            "model": {"w": torch.ones(3), **buffers},
            "args": Namespace(rank=rank, lr=0.1, deep=[{"local_rank": rank}]),
            "hosts": [{"name": f"host{rank}"}],
        }

    def save_with(rank0_values: tuple[str, ...]) -> list[Any]:
        options = SaveOptions(plain_tensors=plain_tensors, rank0_values=rank0_values)
        return SimulatedWorld(2).outcomes(saving(state, tmp_path, options=options))

    error = save_with(())[1]
    assert isinstance(error, CommonStateError)
    pasted = re.search(r"SaveOptions\(rank0_values=(\(.*?\))\)", str(error))
    assert pasted is not None
    assert save_with(ast.literal_eval(pasted[1])) == [None, None]
    loaded = load({}, tmp_path)
    assert (loaded["args"].rank, loaded["args"].deep, loaded["hosts"]) == (
        0,
        [{"local_rank": 0}],
        [{"name": "host0"}],
    )
    assert isinstance(save_with(("args.lr",))[1], CommonStateError)


@pytest.mark.parametrize("key", ["it's", "a]b", "l*[x]", "a\\n", 'q"', "two words", "a.b", 3])
def test_the_option_works_for_many_paths_of_any_text(key: Any) -> None:
    def save_with(rank0_values: tuple[str, ...]) -> list[Any]:
        def state(rank: int) -> dict[Any, Any]:
            of_layers = {f"{i}{key}": rank for i in range(15)} if isinstance(key, str) else {}
            return {"m": of_layers | {key: rank}, **{i: rank for i in range(13)}}

        options = SaveOptions(rank0_values=rank0_values)
        return SimulatedWorld(2).outcomes(saving(state, MemoryStore(), options=options))

    pasted = re.search(r"SaveOptions\(rank0_values=(\(.*\))\)\.", str(save_with(())[1]))
    assert pasted is not None
    assert save_with(ast.literal_eval(pasted[1])) == [None, None]


def test_buffers_of_each_rank_can_be_kept(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        mean = torch.full((2,), float(rank))
        return {"model": {"w": torch.ones(3), "mean": PerRankValue("model.mean", mean)}}

    SimulatedWorld(2).run(saving(state, tmp_path, options=ARRAYS))
    for rank, loaded in enumerate(SimulatedWorld(2).run(loading(state, tmp_path))):
        assert loaded["model"]["mean"].tolist() == [rank, rank]


@pytest.mark.parametrize(
    "state",
    [
        lambda rank: {"x": 1} if rank else {"x": 1, "w": torch.ones(3)},
        lambda rank: {"w": torch.ones(3 + rank)},
    ],
)
def test_tensors_that_some_ranks_lack_or_have_otherwise_are_named(tmp_path: Path, state: Any) -> None:
    error = error_of_all(2, saving(state, tmp_path, options=ARRAYS), CommonStateError)
    assert "'w' on rank(s) 1" in str(error)


@pytest.mark.parametrize(
    "arguments",
    [{"validate_access_integrity": False}, {"preprocess_common_before_consistancy_check": lambda common: {}}],
)
def test_where_nothing_is_compared_rank_0s_are_stored(tmp_path: Path, arguments: dict[str, Any]) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"w": torch.full((5000,), float(rank))}

    SimulatedWorld(3).run(saving(state, tmp_path, options=ARRAYS, **arguments))
    assert not load({}, tmp_path)["w"].any()


def test_names_that_are_taken_stay_common_state(tmp_path: Path) -> None:
    saved = {
        "a.b": torch.ones(2),
        "a": {"b": torch.zeros(2), "c": torch.ones(3), "e": torch.ones(1, requires_grad=False).expand(3)},
        "x": sharded("a.c", torch.zeros(4)),
        (1, 2): torch.ones(2),
        "tuple": (torch.ones(2),),
        "d": torch.ones(2),
    }
    save(saved, tmp_path, options=ARRAYS)
    by_path = {"['a.b']", "['a']['b']", "['a']['c']", "[(1, 2)]"}
    assert set(load_plain_tensors(tmp_path)) == {"a.c", "a.e", "d"} | by_path
    loaded = load({"x": sharded("a.c", torch.ones(4))}, tmp_path)
    assert loaded["a"]["c"].tolist() == [1.0] * 3
    assert loaded["x"].tolist() == [0.0] * 4
    assert loaded["a.b"].tolist() == [1.0] * 2
    assert loaded[1, 2].tolist() == loaded["tuple"][0].tolist() == [1.0] * 2


def test_entities_and_flat_requests_load_from_them(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "list": [torch.ones(2), 5, torch.zeros(2)]}
    save(state, tmp_path, options=ARRAYS)

    def half(rank: int) -> dict[str, Any]:
        return {"model": {"w": sharded("model.w", torch.zeros(3), (0, rank, 2))}}

    for rank, loaded in enumerate(SimulatedWorld(2).run(loading(half, tmp_path))):
        assert loaded["model"]["w"].tolist() == [3.0 * rank + i for i in range(3)]
        assert [str(v) for v in loaded["list"]] == ["tensor([1., 1.])", "5", "tensor([0., 0.])"]
    flat = torch.zeros(6)
    loaded = load({"model.w": flat}, tmp_path)
    assert loaded["model.w"] is flat
    assert flat.tolist() == list(range(6))
    renamed = torch.zeros(6)
    options = LoadOptions(rename={"model.*": "student.*"})
    loaded = load({"student": {"w": renamed}}, tmp_path, options=options)
    assert renamed.tolist() == list(range(6))
    assert "model" not in loaded


def test_what_is_excluded_or_removed_is_left_out(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(3), "v": torch.ones(3)}, "step": 1}, tmp_path, options=ARRAYS)
    kept = torch.full((3,), 9.0)
    loaded = load({"model": {"w": kept}}, tmp_path, options=LoadOptions(exclude=("model.*",)))
    assert loaded["model"] == {"w": kept}
    assert kept.tolist() == [9.0] * 3
    remove_sharded_tensors(tmp_path, "model.v")
    assert list(load({}, tmp_path)["model"]) == ["w"]
    _, _, unexpected = load({"model": {"v": kept}}, tmp_path, strict=StrictHandling.RETURN_ALL)
    assert unexpected == {"model.v"}


def test_saves_take_kept_plans_and_store_new_values() -> None:
    run = Run(2, options=ARRAYS)
    for value in (1.0, 2.0, 3.0):
        state = {"w": torch.full((1000,), value), "step": int(value)}
        assert run.save(lambda rank, state=state: state) is None  # type: ignore[misc]
        assert load({}, run.store)["w"].unique().tolist() == [value]
    assert run.hits == {2}


@pytest.mark.parametrize("exchange", ["all_to_all", "two_stage"])
def test_ranks_read_for_each_other(tmp_path: Path, exchange: Any) -> None:
    saved = {"w": torch.arange(5000.0), "v": torch.arange(3)}
    save(saved, tmp_path, options=ARRAYS)

    def request(rank: int) -> dict[str, Any]:
        return {"v": torch.zeros(3, dtype=torch.int64)}

    load_rank = loading(request, tmp_path, options=LoadOptions(exchange=exchange))
    for loaded in SimulatedWorld(3).run(load_rank):
        assert same(loaded, saved)


def test_an_array_that_no_file_could_fill_takes_no_memory(tmp_path: Path) -> None:
    save({"w": torch.ones(5000)}, tmp_path, options=ARRAYS)
    (data,) = (tmp_path / "data").iterdir()
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(FormatError, match=r"'w' \[0:5000\]: .* It was cut short"):
        load({}, tmp_path)


def test_they_are_arrays_by_default_where_the_format_has_it(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.arange(5.0)}, "step": 4}
    for backend, keys in (("megackpt", ["model.w"]), ("torch_dist", []), ("zarr", [])):
        save(saved, tmp_path / backend, backend)
        with opened_store(tmp_path / backend) as store:
            assert list(open_checkpoint(store).arrays) == keys
        assert set(load_tensors_metadata(tmp_path / backend)) == {"model.w"}
        assert same(load({}, tmp_path / backend, strict="raise_all"), saved)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, saved)
    assert set(load_plain_tensors(tmp_path / "run" / "iter_0000001")) == {"model.w"}


def test_what_a_load_returns_as_common_state_is_no_missing_key(tmp_path: Path) -> None:
    whole = sharded("x", torch.ones(3))
    save({"model": {"w": torch.arange(5.0), "v": torch.ones(2)}, "x": whole}, tmp_path)
    state, missing, unexpected = load({"model": {"w": torch.zeros(5)}}, tmp_path, strict="return_all")
    assert state["model"]["v"].tolist() == [1.0, 1.0]
    assert (missing, unexpected) == ({"x"}, set())
    _, report = load_with_report({}, tmp_path, strict="log_all")
    assert report.missing == {"x"}
    with pytest.raises(MissingKeyError, match=r"holds 1 keys that no rank asks for:\n *'x'"):
        load({}, tmp_path, strict="raise_all")


def test_metadata_lists_them_and_can_be_loaded_by(tmp_path: Path) -> None:
    save({"model": {"w": torch.arange(5.0)}, "step": 4}, tmp_path)
    for metadata in (load_sharded_metadata(tmp_path), load_tensors_metadata(tmp_path)):
        loaded = load(metadata, tmp_path)
        assert sorted(loaded) == ["model.w", "step"]
        assert loaded["model.w"].tolist() == list(range(5))


SAVED: dict[str, Any] = {
    "model": OrderedDict({"w": torch.arange(5.0), "n": torch.tensor(7)}),
    "list": [torch.ones(2), 5],
    "state": {0: {"m": torch.ones(3, dtype=torch.bfloat16)}},
    "step": 4,
}


@pytest.mark.parametrize("backend", ["megackpt", "torch_dist", "zarr"])
def test_conversion_keeps_what_a_load_returns(tmp_path: Path, backend: str) -> None:
    """In formats that cannot refer to arrays they become tensors of common state, also for several ranks."""
    extra = {"x": sharded("x", torch.arange(4))}
    save(SAVED | extra, tmp_path / "c")
    source, target, back = (str(tmp_path / name) for name in ("c", backend, "back"))
    assert main(["convert", source, target, "--to", backend]) == 0
    asked = {"model": {"w": torch.zeros(5)}}
    assert same(load(asked, target), SAVED)
    assert asked["model"]["w"].tolist() == list(range(5))
    for result in (load({}, target), load_common_state_dict(target)):
        assert same(result, SAVED)
    assert set(load_plain_tensors(target)) == {"x", "model.w", "model.n", "list.0", "state.0.m"}
    assert main(["diff", source, target]) == 0
    assert main(["diff", target, source]) == 0
    assert main(["convert", target, back, "--to", "megackpt"]) == 0
    assert same(load({}, back), SAVED)
    assert main(["diff", source, back]) == 0


def test_a_comparison_finds_what_differs_between_an_array_and_common_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"model": {"w": torch.arange(5.0), "gone": torch.ones(2)}}, tmp_path / "a")
    changed = torch.tensor([0.0, 1.0, 2.0, 3.5, 4.0])
    save({"model": {"w": changed}}, tmp_path / "b", options=SaveOptions(plain_tensors="common"))
    for first, second in (("a", "b"), ("b", "a")):
        assert main(["diff", str(tmp_path / first), str(tmp_path / second), "--json"]) == 1
        message = json.loads(capsys.readouterr().out)
        assert [value["path"] for value in message["values"]] == ["common state: model.w"]
        assert message["only_first"] + message["only_second"] == ["model.gone"]
        assert not message["arrays"]


def test_conversion_rejects_arrays_that_are_damaged(tmp_path: Path) -> None:
    save({"w": torch.ones(5000)}, tmp_path / "c")
    (data,) = (tmp_path / "c" / "data").iterdir()
    flip(data, -1)
    arguments = [str(tmp_path / "c"), str(tmp_path / "t"), "--to", "torch_dist"]
    assert main(["convert", *arguments]) == 1
    assert not (tmp_path / "t").exists() or not list((tmp_path / "t").iterdir())
    with pytest.raises(IntegrityError, match="'w'"):
        load_common_state_dict(tmp_path / "c")


def test_inspect_shows_the_arrays_that_common_state_refers_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(SAVED, tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["common"] == {
        "model.w": "array 'model.w'",
        "model.n": "torch.int64 []: 7",
        "list[0]": "array 'list.0'",
        "list[1]": "5",
        "state[0].m": "array 'state.0.m'",
        "step": "4",
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_dcp_reads_them_at_their_paths(tmp_path: Path) -> None:
    save(SAVED, tmp_path / "arrays")
    save(SAVED, tmp_path / "common", options=SaveOptions(plain_tensors="common"))
    results = []
    for name in ("arrays", "common"):
        reader = MegackptStorageReader(tmp_path / name)
        metadata = reader.read_metadata()
        assert metadata.planner_data is not None
        results.append((metadata.planner_data, set(metadata.state_dict_metadata)))
        asked = {"model": {"w": torch.zeros(5)}, "list": [torch.zeros(2), 0], "step": 0}
        dcp.load(asked, storage_reader=reader, **ALONE)
        assert same(asked, {"model": {"w": SAVED["model"]["w"]}, "list": SAVED["list"], "step": 4})
    assert results[0] == results[1]


def test_the_work_for_one_plain_tensor_does_not_depend_on_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[int] = []
    targets = CommonRequest.targets.fget

    def counted(self: CommonRequest) -> Any:
        tables.append(1)
        return targets(self)  # type: ignore[misc]

    monkeypatch.setattr(CommonRequest, "targets", property(counted))
    made = []
    for count in (4, 40):
        state = {f"w{i}": torch.full((2,), float(i)) for i in range(count)}
        megackpt.save(state, tmp_path / str(count))
        tables.clear()
        loaded = megackpt.load({key: torch.zeros(2) for key in state}, tmp_path / str(count))
        assert all(torch.equal(loaded[key], state[key]) for key in state)
        made.append(len(tables))
    assert made[0] == made[1]  # a table of all of them for each one would be quadratic
