"""What all ranks would warn of is logged once, by rank 0; what only some see names one of those."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import Checkpointer, KeyRule, LoadOptions, PerRankValue, Policy, ShardedTensor, load, save
from megackpt.comm import Group
from megackpt.notices import collected_notices, log_notices, notice
from megackpt.testing.world import SimulatedWorld

RANKS = 4
log = logging.getLogger("megackpt.tests")


def whole(key: str, data: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def load_on_ranks(directory: Path, state: Any, **arguments: Any) -> None:
    """Load on all ranks; state gives what a rank asks for."""

    def load_rank(group: Group) -> None:
        load(state(group.rank), directory, group=group, **arguments)

    SimulatedWorld(RANKS).run(load_rank)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save({"a": whole("a", torch.ones(4)), "b": whole("b", torch.ones(2))}, tmp_path / "c", "torch_dist")
    return tmp_path / "c"


def test_each_warning_of_a_load_is_logged_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = (KeyRule(keys="a", cast=Policy.WARN),)
    options = LoadOptions(rules=rules, allow_unsafe_pickle=True)

    def state(rank: int) -> dict[str, ShardedTensor]:
        asked = {"a": whole("a", torch.zeros(4, dtype=torch.bfloat16)), "new": whole("new", torch.zeros(1))}
        return {
            name: ShardedTensor.from_rank_offsets(t.key, t.data, replica_id=rank) for name, t in asked.items()
        }

    load_on_ranks(directory, state, strict="log_all", options=options)
    message = warnings_of(caplog)
    assert len(message) == len(set(message)) == 4
    for part in ("allow_unsafe_pickle", "'new'", "'b'", "stored as float32"):
        assert len([text for text in message if part in text]) == 1, message


def test_what_only_some_ranks_see_names_one_of_them(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state(rank: int) -> dict[str, ShardedTensor]:
        return {"new": whole("new", torch.zeros(1))} if rank > 1 else {"a": whole("a", torch.zeros(4))}

    load_on_ranks(directory, state, strict="log_unexpected")
    (message,) = warnings_of(caplog)
    assert message.startswith("Rank 2 and 1 more: ")


def test_values_that_every_rank_keeps_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"r": PerRankValue("r", 1)}, tmp_path / "c")
    load_on_ranks(tmp_path / "c", lambda rank: {"r": PerRankValue("r", rank, elsewhere="keep")})
    assert len(warnings_of(caplog)) == 1


def test_going_back_to_an_older_step_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"a": whole("a", torch.ones(4))})
    next((tmp_path / "iter_0000002" / "data").iterdir()).unlink()

    def load_rank(group: Group) -> None:
        options = LoadOptions(on_corrupt="fallback")
        Checkpointer(tmp_path, group=group, load_options=options).load({"a": whole("a", torch.zeros(4))})

    SimulatedWorld(RANKS).run(load_rank)
    assert len([text for text in warnings_of(caplog) if "going back to step 1" in text]) == 1


def test_warnings_of_a_block_that_fails_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), collected_notices():  # noqa: PT012
        notice(log, "first")
        raise KeyError("stop")
    notice(log, "at once")
    with collected_notices() as owned:
        notice(log, "later")
    assert warnings_of(caplog) == ["first", "at once"]
    log_notices([owned, owned])
    log_notices([[], owned])
    assert warnings_of(caplog)[2:] == ["later", "Rank 1: later"]
