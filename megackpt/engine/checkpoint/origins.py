"""What a step records about the step that it continues, and the steps that a restart takes: a tree of steps.

A run that loads step 300 and saves step 400, although there is a step 5000, begins a new branch. Branches of
one root are numbered in the order in which they begin. The newest step is the last of the newest branch. The
steps from which it comes are the line of the run; all others are abandoned.

A step without a record is on branch 0: an older version or another program has saved it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megackpt.engine.checkpoint.manifest import read_manifest
from megackpt.errors import FormatError, NotACheckpointError, StorageError
from megackpt.formats.registry import load_strategy
from megackpt.formats.strategy import Json, LoadStrategy
from megackpt.storage import Store, digest_of

FIELD = "origin"
"""The field of metadata.json, or of the note of a format whose metadata.json is fixed, with the record."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrigin:
    """What a step records about its run.

    Attributes:
        run: id of the run that saved it: a `Checkpointer`, from its construction or a load to the next load.
        branch: number of its branch.
        continues: the step that this run loaded or saved before; None if there is none.
        continues_run: id of the run that saved that step; empty if it is not recorded.
        earlier: by earlier branch, the last of its steps from which this step comes.
    """

    run: str = ""
    branch: int = 0
    continues: int | None = None
    continues_run: str = ""
    earlier: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the record as values of JSON, with a digest: no other covers metadata.json."""
        record = {
            "run": self.run,
            "branch": self.branch,
            "continues": self.continues,
            "continues_run": self.continues_run,
            "earlier": [[branch, step] for branch, step in sorted(self.earlier.items())],
        }
        return record | {"xxh3_128": _digest(record)}

    @classmethod
    def from_json(cls, record: object) -> StepOrigin:
        """Return the origin that a record describes; that of a step without a record for None.

        Raises:
            FormatError: the record is malformed.
        """
        if record is None:
            return cls()
        fault = FormatError(
            f"The record of the origin of a step is {record!r}: it is damaged. Load another step."
        )
        if not isinstance(record, dict):
            raise fault
        if record.get("xxh3_128") != _digest({k: v for k, v in record.items() if k != "xxh3_128"}):
            raise fault
        try:
            continues = record["continues"]
            return cls(
                run=str(record["run"]),
                branch=_number(record["branch"]),
                continues=None if continues is None else _number(continues),
                continues_run=str(record["continues_run"]),
                earlier={_number(branch): _number(step) for branch, step in record["earlier"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise fault from error

    def includes(self, branch: int, step: int) -> bool:
        """Return whether a step of an earlier branch is one from which this step comes."""
        return step <= self.earlier.get(branch, -1)


def _digest(record: Mapping[str, Any]) -> str:
    return digest_of(json.dumps(record, sort_keys=True).encode())


def _number(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def origin_in(store: Store, manifest: Json, strategy: LoadStrategy) -> StepOrigin:
    """Return the origin of a committed checkpoint with this manifest. Local.

    Raises:
        FormatError: the record is damaged.
    """
    return StepOrigin.from_json(strategy.published_entries(store, manifest).get(FIELD))


def read_origin(store: Store) -> StepOrigin | None:
    """Return the origin of a committed step; None if its commit is damaged. Local.

    Raises:
        NotACheckpointError: there is no commit.
        StorageError: the store rejected the read.
    """
    try:
        manifest = read_manifest(store)
        return origin_in(store, manifest, load_strategy(manifest, where=store.location))
    except FormatError:
        return None
    except NotACheckpointError:
        raise
    except StorageError as error:
        if error.errno is None:  # not of the system: a link, which the store does not follow
            return None
        raise


@dataclass(frozen=True, slots=True)
class PlacedStep(Generic[T]):
    """A committed step somewhere.

    Attributes:
        step: its number.
        origin: what it records; None if its commit is damaged.
        location: anything that says where it is.
    """

    step: int
    origin: StepOrigin | None
    location: T


@dataclass(frozen=True, slots=True)
class StepTree(Generic[T]):
    """The committed steps of a run.

    Attributes:
        line: the newest step and those from which it comes, ascending, with steps whose commit is damaged:
            nobody knows whether they are abandoned, so a load of one raises its error.
        abandoned: the other steps, ascending.
    """

    line: tuple[PlacedStep[T], ...]
    abandoned: tuple[PlacedStep[T], ...]

    @property
    def newest(self) -> int | None:
        """The step that a restart takes; None if there is none."""
        return self.line[-1].step if self.line else None


def newest_known(steps: Iterable[PlacedStep[T]]) -> PlacedStep[T] | None:
    """Return the last step of the newest branch; None if no step has an undamaged commit. Pure."""
    known = [(s.origin.branch, s.step, n, s) for n, s in enumerate(steps) if s.origin is not None]
    return max(known, key=lambda row: row[:3])[3] if known else None


def step_tree(steps: Sequence[PlacedStep[T]]) -> StepTree[T]:
    """Return the steps of a run as a tree. Pure.

    >>> old = [PlacedStep(step, StepOrigin(), "") for step in (300, 400, 500)]
    >>> new = PlacedStep(350, StepOrigin(branch=1, continues=300, earlier={0: 300}), "")
    >>> tree = step_tree([*old, new])
    >>> [placed.step for placed in tree.line], [placed.step for placed in tree.abandoned]
    ([300, 350], [400, 500])
    """
    newest = newest_known(steps)
    line: list[PlacedStep[T]] = []
    abandoned: list[PlacedStep[T]] = []
    for placed in sorted(steps, key=lambda placed: placed.step):
        is_in_line = newest is None or placed.origin is None or is_ancestor(placed, newest)
        (line if is_in_line else abandoned).append(placed)
    return StepTree(tuple(line), tuple(abandoned))


def is_ancestor(placed: PlacedStep[Any], newest: PlacedStep[Any]) -> bool:
    """Return whether one step is another or comes before it on its line. Both have an origin. Pure."""
    assert placed.origin is not None
    assert newest.origin is not None
    if placed.origin.branch == newest.origin.branch:
        return placed.step <= newest.step
    return newest.origin.includes(placed.origin.branch, placed.step)
