"""State dicts that Apex's DistributedFusedAdam has saved itself are read, without their pickles running."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import FormatError, MismatchError, UnknownClassError, load, save
from megackpt.integrations.apex import declare_gathered, load_sharded_state_dict, sharded_state_dict
from megackpt.testing.world import SimulatedRank, SimulatedWorld
from tests.support import fake_apex
from tests.support.apex_training import are_equal, declare, make_ranks, train_ranks


@pytest.mark.parametrize("name", ["float32 masters", "remainders"])
def test_a_state_dict_of_apex_s_own_is_saved_again_and_loads_at_other_ranks(
    name: str, tmp_path: Path
) -> None:
    params, (optimizer,) = make_ranks(0, 1, name)
    train_ranks(params, [optimizer], range(4))
    torch.save(optimizer.state_dict(), tmp_path / "apex.pt")
    stored = torch.load(tmp_path / "apex.pt", map_location="cpu", weights_only=True)
    model = declare(params[0])
    save({"model": model, "optimizer": declare_gathered(stored, params[0], model)}, tmp_path / "ours")
    fresh, resumed = make_ranks(1, 2, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(fresh[rank.rank], rank.rank)
        request = {"model": model, "optimizer": sharded_state_dict(resumed[rank.rank], model)}
        state = load(request, tmp_path / "ours", group=rank)
        load_sharded_state_dict(resumed[rank.rank], state["optimizer"])

    SimulatedWorld(2).run(load_rank)
    train_ranks(params, [optimizer], range(4, 6))
    train_ranks(fresh, resumed, range(4, 6))
    assert all(are_equal(params[0], p) for p in fresh)


@pytest.mark.parametrize("name", ["float32 masters", "remainders", "no masters"])
def test_pickled_states_of_all_ranks_are_saved_again_and_load_at_another_number(
    name: str, tmp_path: Path
) -> None:
    """Format 1 of Apex, which Apex itself reads at the same number of ranks only."""
    params, optimizers = make_ranks(0, 2, name)
    train_ranks(params, optimizers, range(4))
    with fake_apex.names_of_apex():
        torch.save(fake_apex.state_dict_of_format_1(optimizers), tmp_path / "apex.pt")
    stored = torch.load(tmp_path / "apex.pt", map_location="cpu", weights_only=True)
    model = declare(params[0])
    save({"model": model, "optimizer": declare_gathered(stored, params[0], model)}, tmp_path / "ours")
    fresh, resumed = make_ranks(1, 3, name)

    def load_rank(rank: SimulatedRank) -> None:
        model = declare(fresh[rank.rank], rank.rank)
        request = {"model": model, "optimizer": sharded_state_dict(resumed[rank.rank], model)}
        state = load(request, tmp_path / "ours", group=rank)
        load_sharded_state_dict(resumed[rank.rank], state["optimizer"])

    SimulatedWorld(3).run(load_rank)
    train_ranks(params, optimizers, range(4, 6))
    train_ranks(fresh, resumed, range(4, 6))
    assert all(are_equal(params[0], p) for p in fresh)


class Trap:
    """What a malicious file has in the place of a bucket."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-run"),))


def test_bytes_that_name_another_class_are_rejected_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params, (optimizer,) = make_ranks(0, 1, "float32 masters")
    train_ranks(params, [optimizer], range(1))
    model = declare(params[0])
    optimizer.state["buckets"].append(Trap())
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1([optimizer])
    with pytest.raises(UnknownClassError, match=rf"names {re.escape(Path.__module__)}\.Path"):
        declare_gathered(stored, params[0], model)
    assert not Path("was-run").exists()
    # Bytes that get something else of the outer class.
    optimizer.state["buckets"][-1] = OtherOfApex()
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1([optimizer])
    with pytest.raises(FormatError, match="a call of getattr"):
        declare_gathered(stored, params[0], model)


class OtherOfApex:
    def __reduce__(self) -> Any:
        outer = sys.modules["apex.contrib.optimizers.distributed_fused_adam"]
        return (getattr, (outer.DistributedFusedAdam, "__init__"))


def test_pickled_states_of_some_ranks_or_twice_are_an_error() -> None:
    params, optimizers = make_ranks(0, 2, "float32 masters")
    train_ranks(params, optimizers, range(1))
    with fake_apex.names_of_apex():
        stored = fake_apex.state_dict_of_format_1(optimizers)
    first, second = stored["gathered_states"]
    model = declare(params[0])
    for gathered in ([first], [first, second, second]):
        with pytest.raises(FormatError, match="elements are not in the state of exactly one rank"):
            declare_gathered({"format": 1, "gathered_states": gathered}, params[0], model)
    with pytest.raises(FormatError, match="of other parameters"):
        declare_gathered(stored, params[0][:2], model)


def test_other_state_dicts_of_apex_are_errors() -> None:
    params, (optimizer,) = make_ranks(0, 1, "remainders")
    train_ranks(params, [optimizer], range(1))
    stored, model = optimizer.state_dict(), declare(params[0])
    with pytest.raises(FormatError, match="has the format 1 and no 'gathered_states'"):
        declare_gathered({**stored, "format": 1}, params[0], model)
    with pytest.raises(MismatchError, match=r"\[24, 13, 90\] elements, and these are of \[24, 13\]"):
        declare_gathered(stored, params[0][:2], model)
