"""Option objects of a `Checkpointer`: which steps stay, when to save, tiers, groups of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from megackpt.comm import AnyGroup, Group, check_group
from megackpt.comm.process_groups import check_group_argument
from megackpt.errors import DeclarationError
from megackpt.ground.arguments import check_count, check_kind, check_seconds
from megackpt.storage import absolute_path

Mode = Literal["min", "max"]
OnError = Literal["raise", "warn"]
OnNewerSteps = Literal["error", "keep", "discard"]
MAX_SIGNALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBest:
    """The best steps by a metric that was given to `Checkpointer.save`.

    A step that was saved without the metric, or whose value is not finite, is never among the best. Of two
    steps with equal values, the newer is better.

    Attributes:
        metric: the name of the metric.
        n: how many steps stay.
        mode: `min` if small values are good, `max` if large ones are.
    """

    metric: str
    n: int = 1
    mode: Mode = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise DeclarationError(f"KeepBest(metric={self.metric!r}): give the name of a metric.")
        check_count("KeepBest.n", self.n)
        if self.mode not in get_args(Mode):
            raise DeclarationError(f"KeepBest(mode={self.mode!r}): give 'min' or 'max'.")

    def best_of(self, metrics: Mapping[int, Mapping[str, float]]) -> tuple[int, ...]:
        """Return the best steps, the best first. metrics has the metrics of each step."""
        sign = 1 if self.mode == "min" else -1
        finite = {
            step: values[self.metric]
            for step, values in metrics.items()
            if math.isfinite(values.get(self.metric, math.nan))
        }
        return tuple(sorted(finite, key=lambda step: (sign * finite[step], -step))[: self.n])


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which steps stay: those that any of the fields keeps; all steps if no field is given.

    The newest step and pinned steps always stay.

    Attributes:
        keep_last: the number of newest steps that stay.
        keep_every: multiples of this number stay.
        keep_best: the best steps by a metric stay.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: KeepBest | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                check_count(f"Retention.{name}", getattr(self, name), otherwise=", or None")
        check_kind(
            "Retention.keep_best",
            self.keep_best,
            KeepBest,
            give="a KeepBest, as KeepBest(metric='loss', n=2)",
            optional=True,
        )

    @property
    def keeps_all(self) -> bool:
        """Whether all steps stay."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """When a save is due: at whichever of the fields comes first.

    Attributes:
        steps: at each multiple of this number of steps.
        seconds: when this time has passed since the last save, by rank 0's clock.
        signals: when any rank has received one of these signals, as `(signal.SIGTERM, signal.SIGUSR1)`.
            SIGUSR1 and SIGUSR2 only cause a save; any other also sets `Checkpointer.exit_requested`.
        agree_s: about how many seconds of training pass until all ranks know of a signal, or that a save is
            due by time.
    """

    steps: int | None = None
    seconds: float | None = None
    signals: tuple[int, ...] = ()
    agree_s: float = 1.0

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("SaveSchedule.steps", self.steps, otherwise=", or None")
        if self.seconds is not None:
            check_seconds("SaveSchedule.seconds", self.seconds, otherwise=", or None")
        check_seconds("SaveSchedule.agree_s", self.agree_s)
        object.__setattr__(self, "signals", _checked_signals(self.signals))


@dataclass(frozen=True, slots=True)
class Tier:
    """Node-local storage for steps; see `MemoryTier` and `LocalTier`.

    Attributes:
        path: a directory with the same path on every node; `{node}` in it stands for the node's name.
        every: multiples of this step number are saved here.
        keep_last: how many steps stay; while the next step is written, it is there in addition.
        replication_factor: how many nodes have each byte. With 1 a step survives the death of processes, with
            2 the loss of a node. With fewer nodes, every node has each byte.
        jump: the distance, in nodes, to the next copy. Choose it so that both nodes fail independently.
    """

    kind: ClassVar[str] = "tier"

    path: str | os.PathLike[str]
    # Not KW_ONLY: typing.get_type_hints of Python 3.10 does not take it.
    every: int = field(default=1, kw_only=True)
    keep_last: int = field(default=2, kw_only=True)
    replication_factor: int = field(default=2, kw_only=True)
    jump: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise DeclarationError(f"{kind}: path is {self.path!r}; give a directory, as '/dev/shm/run'.")
        for name in ("every", "keep_last", "replication_factor", "jump"):
            check_count(f"{kind}: {name}", getattr(self, name))

    def __str__(self) -> str:
        return f"the {self.kind} tier {os.fspath(self.path)}"


@dataclass(frozen=True, slots=True)
class MemoryTier(Tier):
    """A directory in the memory of each node, such as `/dev/shm/run`.

    Its steps survive the death of processes and, with a replication_factor above 1, the loss of a node, but
    not of all nodes.

    >>> MemoryTier("/dev/shm/run", every=10).replication_factor
    2
    """

    kind: ClassVar[str] = "memory"


@dataclass(frozen=True, slots=True)
class LocalTier(Tier):
    """A directory on a disk of each node. Its steps survive a loss of power if the node comes back."""

    kind: ClassVar[str] = "local disk"


@dataclass(frozen=True, slots=True)
class Tiers:
    """Storage of the nodes for steps, in addition to the root. See docs/checkpointer.md.

    Attributes:
        tiers: `MemoryTier`s and `LocalTier`s, each with its own directory. If several tiers have the same
            step, a load takes the first.
        root_every: multiples of this step number go to the root; other steps go into tiers only.
        node: name or number of this rank's node. None: groups of LOCAL_WORLD_SIZE ranks share a node, as
            torchrun places them; without that variable, ranks with the same host name.

    >>> Tiers([MemoryTier("/dev/shm/run", every=10)], root_every=100).root_every
    100
    """

    tiers: Sequence[Tier] = ()
    root_every: int = field(default=1, kw_only=True)
    node: str | int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        tiers = self.tiers
        if not isinstance(tiers, (list, tuple)) or not all(isinstance(tier, Tier) for tier in tiers):
            raise DeclarationError(
                f"tiers is {tiers!r}; give a list of tiers, as [MemoryTier('/dev/shm/run')], or "
                f"Tiers([...], root_every=...)."
            )
        object.__setattr__(self, "tiers", tuple(tiers))
        paths = [absolute_path(tier.path) for tier in tiers]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise DeclarationError(f"Two tiers are in {twice}. Give each its own directory.")
        check_count(
            "Tiers.root_every",
            self.root_every,
            otherwise=": steps that are multiples of it go to the root",
        )
        give = "the name or the number of this rank's node, or None to find it out"
        if self.node == "" or isinstance(self.node, bool):
            raise DeclarationError(f"Tiers.node is {self.node!r}; give {give}.")
        check_kind("Tiers.node", self.node, (str, int), give=give, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of ranks that a `Checkpointer` uses.

    Attributes:
        world: all ranks that save and load, as `group` of `megackpt.save`; None: all ranks of
            torch.distributed.
        spread: `spread_group` of `megackpt.save`, for `SaveOptions(spread="group")`.
        exchange: `exchange_group` of `megackpt.load`, for `LoadOptions(exchange=...)`.
    """

    world: Group | None = None
    spread: AnyGroup | None = None
    exchange: AnyGroup | None = None

    def __post_init__(self) -> None:
        if self.world is not None:
            check_group(self.world, name="Groups.world")
        for name in ("spread", "exchange"):
            if getattr(self, name) is not None:
                check_group_argument(f"Groups.{name}", getattr(self, name))


def _checked_signals(signals: object) -> tuple[int, ...]:
    """Return the numbers of signals, ascending, each once."""
    numbers: set[object] = {None}
    if isinstance(signals, Iterable) and not isinstance(signals, bytes):  # bytes would yield ints
        numbers = set(signals)
    signums = sorted(int(n) for n in numbers if isinstance(n, int) and not isinstance(n, bool))
    if len(signums) != len(numbers):
        raise DeclarationError(
            f"SaveSchedule.signals is {signals!r}; give a tuple of signals, as (signal.SIGTERM,)."
        )
    if len(signums) > MAX_SIGNALS:
        raise DeclarationError(
            f"SaveSchedule.signals has {len(signums)} signals; give at most {MAX_SIGNALS}."
        )
    return tuple(signums)
