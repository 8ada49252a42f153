"""Estimates times on other hardware, and how often to save.

Seconds are computed from bytes and bandwidths. No estimate is better than the given bandwidths: `megackpt
bench` measures those of a directory.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megackpt.cli.simulation.outcome import LoadOutcome, SaveOutcome
from megackpt.ground.arguments import check_count, check_number
from megackpt.plans.geometry import Ints

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the machines do; bandwidths in GB/s, 10^9 bytes a second. None: it is no limit.

    Attributes:
        ranks_per_node: neighbouring ranks that share a node.
        write: what one node writes.
        read: what one node reads.
        total_write: what the storage takes from all nodes together.
        total_read: what it gives to all nodes together.
        network: what one node receives from others.
        stage: what one rank copies from its devices to host memory, for an asynchronous save.
        mtbf_hours: mean time between failures that stop the job.

    Raises:
        DeclarationError: a number that is not above 0.
    """

    ranks_per_node: int = 8
    write: float | None = None
    read: float | None = None
    total_write: float | None = None
    total_read: float | None = None
    network: float | None = None
    stage: float | None = None
    mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and name != "ranks_per_node":
                check_number(name, value)
        check_count("ranks_per_node", self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds; None where no bandwidth was given for it.

    Attributes:
        first_save: the first save of a state: planning and proof, then as a later one.
        later_save: a save that uses the plan of an earlier one: all bytes written, and the index.
        writing: the part of both in which bytes are written.
        async_stall: how long training waits for an asynchronous save: it describes its state and
            copies its bytes, and writes nothing.
        load_direct: every rank reads for itself.
        load_exchange: groups read each byte once and exchange it.
        interval: advice about saves, where a time between failures was given.
    """

    first_save: float | None
    later_save: float | None
    writing: float | None
    async_stall: float | None
    load_direct: float | None
    load_exchange: float | None
    interval: Interval | None

    @property
    def advice(self) -> str:
        """One sentence on how often to save; empty without a time between failures."""
        if self.interval is None:
            return ""
        seconds, efficiency = self.interval.daly, self.interval.efficiency
        waits = self.later_save if self.async_stall is None else self.async_stall
        kind = "a save" if self.async_stall is None else "an asynchronous save"
        return (
            f"Save every {seconds_text(seconds)}: training waits {seconds_text(waits or 0.0)} for {kind}, "
            f"and {efficiency:.1%} of the time is progress."
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """How long to train between two saves, in seconds.

    Attributes:
        young: `sqrt(2 C M)`, for a save that takes C and a mean time between failures of M.
        daly: Daly's higher-order estimate, which is also valid where C is not small compared with M.
        efficiency: the share of time that is progress at Daly's interval; the rest are saves, lost work and
            restarts.
    """

    young: float
    daly: float
    efficiency: float


def estimate(save: SaveOutcome, load: LoadOutcome | None, cluster: Cluster) -> Estimate:
    """Return the times of a save and a load on a cluster. Pure.

    A phase takes as long as its slowest node, or as the storage as a whole if that is longer. An exchange
    overlaps with reading, so the longer of the two counts.
    """
    writing = None
    if save.layout is not None:
        writing = slowest(save.nbytes, cluster.ranks_per_node, cluster.write, cluster.total_write)
    later_s = None if writing is None else writing + save.every_save_s
    first_s = None if later_s is None else later_s + save.first_save_s
    stall_s = None
    if save.layout is not None and cluster.stage is not None:
        copied_s = float(save.nbytes.max(initial=0)) / (cluster.stage * GB)
        stall_s = copied_s + float(save.describe_s.max(initial=0.0))
    wait_s = later_s if stall_s is None else stall_s
    direct = exchange = None
    if load is not None:
        planning = float(load.plan_s.max(initial=0.0) + load.region_s.max(initial=0.0))
        direct, exchange = _load_times(load, cluster)
        direct = None if direct is None else direct + planning
        exchange = None if exchange is None else exchange + planning
    interval = None
    if wait_s is not None and cluster.mtbf_hours is not None:
        known = [seconds for seconds in (direct, exchange) if seconds is not None]
        restart_s = min(known, default=later_s or wait_s)
        # A save that is written in the background ends before the next one begins.
        least_s = 0.0 if stall_s is None or later_s is None else later_s
        interval = advise(wait_s, mtbf_s=cluster.mtbf_hours * 3600, restart_s=restart_s, least_s=least_s)
    return Estimate(
        first_save=first_s,
        later_save=later_s,
        writing=writing,
        async_stall=stall_s,
        load_direct=direct,
        load_exchange=exchange,
        interval=interval,
    )


def seconds_text(seconds: float) -> str:
    """Return a time as text, in a unit that fits it.

    >>> seconds_text(0.25), seconds_text(87.0), seconds_text(1200.0), seconds_text(36000.0)
    ('250 ms', '87.0 s', '20.0 min', '10.0 h')
    """
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 36000 else f"{seconds / 3600:.1f} h"


def slowest(nbytes: Ints, ranks_per_node: int, node: float | None, total: float | None) -> float | None:
    """Return the seconds that all nodes take to move the bytes of their ranks; None without a bandwidth."""
    nodes = np.add.reduceat(nbytes, np.arange(0, len(nbytes), ranks_per_node)) if len(nbytes) else nbytes
    times = [] if node is None else [float(nodes.max(initial=0)) / (node * GB)]
    times += [] if total is None else [float(nbytes.sum()) / (total * GB)]
    return max(times, default=None)


def advise(save_s: float, *, mtbf_s: float, restart_s: float, least_s: float = 0.0) -> Interval:
    """Return how long to train between saves for which training waits save_s; at least least_s.

    >>> advice = advise(60.0, mtbf_s=3 * 3600.0, restart_s=120.0)
    >>> round(advice.young), round(advice.daly), round(advice.efficiency, 3)
    (1138, 1099, 0.888)

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher
    order estimate of the optimum checkpoint interval for restart dumps", equation 37, and its model of the
    time to solution for the efficiency.
    """
    young = math.sqrt(2 * save_s * mtbf_s)
    ratio = save_s / (2 * mtbf_s)
    daly = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s if save_s < 2 * mtbf_s else mtbf_s
    young, daly = max(young, least_s), max(daly, least_s)
    # Time to solution over time of computing alone: M e^(R/M) (e^((t + C)/M) - 1) / t.
    exponent = (daly + save_s) / mtbf_s
    slowdown = (
        mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent) / daly if exponent < 500 else math.inf
    )
    return Interval(young=young, daly=daly, efficiency=1 / slowdown)


def of_all_ranks(of_planned: Ints, load: LoadOutcome) -> Ints:
    """Return a number for each rank: ranks that were not planned have that of the last planned one before."""
    at = np.searchsorted(load.planned, np.arange(load.layout.world_size), side="right") - 1
    spread: Ints = of_planned[np.maximum(at, 0)]
    return spread


def _load_times(load: LoadOutcome, cluster: Cluster) -> tuple[float | None, float | None]:
    """Return the seconds of reading alone, and of reading and exchanging."""
    layout, per_node = load.layout, cluster.ranks_per_node
    group = np.arange(layout.world_size) % layout.tp + layout.tp * (
        np.arange(layout.world_size) // (layout.stage_size)
    )
    read, needed = of_all_ranks(load.read, load), of_all_ranks(load.needed, load)
    direct = slowest(read, per_node, cluster.read, cluster.total_read)
    shared = slowest(
        (load.shared_read // layout.size("dp_cp"))[group], per_node, cluster.read, cluster.total_read
    )
    if shared is None:
        return direct, None
    received = np.maximum(needed - (load.unique // layout.size("dp_cp"))[group], 0)
    sent = slowest(received, per_node, cluster.network, None)
    return direct, max(shared, sent or 0.0)
