"""Times on other hardware: arithmetic by hand compared with that of the library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megackpt.errors import DeclarationError
from megackpt.parallel import ParallelLayout
from megackpt.simulation import Cluster, advise, estimate
from megackpt.simulation.estimate import slowest
from megackpt.simulation.outcome import LoadOutcome, SaveOutcome

GB = 10**9


def save_of(*nbytes: int) -> SaveOutcome:
    written = np.array(nbytes, np.int64)
    return SaveOutcome(
        layout=ParallelLayout(dp=len(nbytes)),
        nbytes=written,
        chunks=np.ones_like(written),
        arrays=1,
        index_nbytes=100,
        rank_s=np.zeros(len(nbytes)),
        plan_s=1.0,
        prove_s=0.5,
    )


def load_of(*, planned: list[int], needed: list[int], read: list[int], **group: int) -> LoadOutcome:
    """A load of four ranks of one data-parallel group."""
    return LoadOutcome(
        layout=ParallelLayout(dp=4),
        planned=np.array(planned, np.int64),
        needed=np.array(needed, np.int64),
        read=np.array(read, np.int64),
        files=np.ones(len(planned), np.int64),
        plan_s=np.zeros(len(planned)),
        region_s=np.zeros(1),
        region_nbytes=0,
        unique=np.array([group["unique"]], np.int64),
        shared_read=np.array([group["shared_read"]], np.int64),
    )


def test_the_slowest_node_or_the_storage_as_a_whole_counts() -> None:
    nbytes = np.array([4, 4, 1, 1, 6], np.int64) * GB
    assert slowest(nbytes, 2, 2.0, None) == 4.0  # nodes have 8, 2 and 6 GB
    assert slowest(nbytes, 2, 2.0, 2.0) == 8.0  # all 16 GB through 2 GB/s
    assert slowest(nbytes, 2, 2.0, 100.0) == 4.0
    assert slowest(nbytes, 8, None, 4.0) == 4.0
    assert slowest(nbytes, 2, None, None) is None


def test_a_save_takes_its_bytes_and_its_planning() -> None:
    times = estimate(save_of(4 * GB, 2 * GB), None, Cluster(ranks_per_node=1, write=2.0))
    assert times.save == pytest.approx(2.0 + 1.5)
    assert (times.load_direct, times.load_exchange, times.interval) == (None, None, None)


def test_an_exchange_takes_the_longer_of_reading_and_sending() -> None:
    load = load_of(
        planned=[0, 1, 2, 3], needed=[8 * GB] * 4, read=[10 * GB] * 4, unique=8 * GB, shared_read=12 * GB
    )
    message: dict[str, Any] = {"ranks_per_node": 1, "read": 1.0}
    assert estimate(save_of(1), load, Cluster(**message)).load_direct == pytest.approx(10.0)
    # Each reads a quarter of 12 GB, and receives what it needs but for the 2 GB that it read itself.
    assert estimate(save_of(1), load, Cluster(**message, network=3.0)).load_exchange == pytest.approx(3.0)
    assert estimate(save_of(1), load, Cluster(**message, network=1.0)).load_exchange == pytest.approx(6.0)
    assert estimate(save_of(1), load, Cluster(**message)).load_exchange == pytest.approx(3.0)


def test_ranks_that_were_not_planned_are_taken_for_their_neighbours() -> None:
    load = load_of(planned=[0, 2], needed=[GB, 2 * GB], read=[GB, 3 * GB], unique=GB, shared_read=GB)
    times = estimate(save_of(1), load, Cluster(ranks_per_node=2, read=1.0))
    assert times.load_direct == pytest.approx(6.0)
    assert load.total_needed == 6 * GB
    assert load.total_read == 8 * GB
    assert load.exchanged == 5 * GB


def test_advice_is_that_of_the_papers() -> None:
    advice = advise(300.0, mtbf_s=6 * 3600.0, restart_s=600.0)
    assert advice.young == pytest.approx((2 * 300 * 21600) ** 0.5)
    ratio = 300 / 43200
    assert advice.daly == pytest.approx(advice.young * (1 + ratio**0.5 / 3 + ratio / 9) - 300)
    # It is the best interval of Daly's model of the time to solution, to within a percent of an hour.
    best = min(range(600, 20000, 10), key=lambda t: slowdown(t, 300.0, 21600.0))
    assert abs(best - advice.daly) < 36
    assert 1 / advice.efficiency == pytest.approx(
        slowdown(advice.daly, 300.0, 21600.0) * math.exp(600 / 21600)
    )


def test_a_save_that_outlasts_the_machine_has_an_interval_and_no_progress() -> None:
    assert advise(7200.0, mtbf_s=3600.0, restart_s=0.0).daly == 3600.0
    assert advise(1e6, mtbf_s=60.0, restart_s=0.0).efficiency == 0.0


def slowdown(interval: float, save_s: float, mtbf_s: float) -> float:
    return mtbf_s * math.expm1((interval + save_s) / mtbf_s) / interval


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bandwidth_that_cannot_be_raises_an_error(value: float) -> None:
    with pytest.raises(DeclarationError, match=r"network is .*; give a finite number above 0"):
        Cluster(network=value)
