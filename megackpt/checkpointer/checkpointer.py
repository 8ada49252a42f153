"""Checkpointer: the steps of one training run under one directory or URL.

Owns which steps there are, which is the newest, and how long they are kept. A step counts if it was
committed: nothing else is consulted, so a torn save can never be chosen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megackpt.api import ReturnsState, label_to_spread, load, load_content_metadata
from megackpt.checkpointer.recovery import Recovery, Root
from megackpt.checkpointer.survey import LastLoad
from megackpt.checkpointer.tiers import Tier, TierSet, check_tiers
from megackpt.comm import GivenGroup, Group, borrow_group, return_group, together, world_group
from megackpt.engine.background import Background, Staging
from megackpt.engine.plan_cache import PlanCache
from megackpt.engine.save import SaveRequest, plan_state
from megackpt.engine.steps import step_name, step_of, step_places
from megackpt.engine.write import Planned, write_out
from megackpt.errors import DeclarationError, NotACheckpointError, UnsupportedError
from megackpt.formats.registry import SaveChoice, save_strategy
from megackpt.formats.strategy import SaveStrategy
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.options import LoadOptions, SaveOptions
from megackpt.storage import ObjectOptions, Store, is_object_url
from megackpt.validation import StrictHandling

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepList:
    """The step directories under a root, sorted.

    Attributes:
        committed: steps that can be loaded.
        torn: steps whose save did not finish, or whose removal did not; directories that hold anything but
            what a save of ours writes are not among them.
    """

    committed: tuple[int, ...]
    torn: tuple[int, ...]


class Checkpointer:
    """Saves and loads numbered steps under a root, `iter_0000100` for step 100.

    The root is a directory, or the URL of one in an object store, `s3://bucket/run`; then objects are the
    options for it.

    Saving, loading and finding are collective over the group. A step that is not committed is never loaded;
    what a torn save left is removed once a step as new as it is committed.

    With async_save, `save` returns as soon as the state is copied to host memory, and a thread writes and
    commits; the next `save`, `wait` or `close` waits for it and raises its error. The memory for the copies
    is kept.

    spread_group and exchange_group are those of `megackpt.save` and `megackpt.load`, for options that ask for
    them.

    With tiers, steps also go into storage of the nodes, each tier at its own interval, and `load` takes the
    newest step that is whole over tiers and root; see docs/tiers.md. node is that of `TierSet`.

    Attributes:
        root: the directory, or the URL as text.
        keep_last: how many committed steps stay; None for all. Older ones are removed once a newer is
            committed.
        async_save: whether `save` returns before the step is committed.
        every: steps that are multiples of it go to the root; others into tiers only.
        last_load: what the last `load` with tiers has used; None before.

    >>> with Checkpointer("ckpt", keep_last=3) as checkpointer:        # doctest: +SKIP
    ...     checkpointer.save(100, {"model": model.sharded_state_dict()})
    ...     state = checkpointer.load({"model": model.sharded_state_dict()})
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        async_save: bool = False,
        tiers: Sequence[Tier] = (),
        every: int = 1,
        node: str | int | None = None,
        save_options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        group: Group | None = None,
        spread_group: GivenGroup | None = None,
        exchange_group: GivenGroup | None = None,
        objects: ObjectOptions | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise DeclarationError(
                f"keep_last is {keep_last}; keep at least 1 step, or give None to keep all."
            )
        if every < 1:
            raise DeclarationError(f"every is {every}; give at least 1 step.")
        check_tiers(tiers)
        self._tiers = TierSet(tiers, node=node)
        self.every = every
        self.last_load: LastLoad | None = None
        self._places = step_places(root, objects=objects)
        where = self._places.location
        self.root: Path | str = where if is_object_url(where) else Path(where)
        self.keep_last = keep_last
        self.async_save = async_save
        self._save_options = save_options or SaveOptions()
        self._load_options = load_options or LoadOptions()
        self._group = group
        self._spread_group = spread_group
        self._exchange_group = exchange_group
        self._plans = PlanCache()
        self._staging = Staging()
        self._background = Background()
        self._behind: Group | None = None  # what the thread speaks through

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def location(self, step: int) -> str:
        """Return the path or URL where a step is or would be."""
        return f"{self._places.location}/{step_name(step)}"

    def directory(self, step: int) -> Path:
        """Return the directory where a step is or would be.

        Raises:
            UnsupportedError: the root is an URL; see `location`.
        """
        if not isinstance(self.root, Path):
            raise UnsupportedError(
                f"{self.root} is not on a file system, so its steps have no directories. "
                f"Use location({step})."
            )
        return self.root / step_name(step)

    def scan(self) -> StepList:
        """Look at the root. Local."""
        names = [name for name in self._places.names() if step_of(name) is not None]
        committed = set(self._places.committed(names))
        torn = [name for name in names if name not in committed and self._places.is_leftover(name)]
        return StepList(_steps_of(committed), _steps_of(torn))

    def steps(self) -> tuple[int, ...]:
        """Return the committed steps, ascending. Local."""
        return self.scan().committed

    def latest(self) -> int | None:
        """Return the newest committed step or None; warn of a newer one that is torn. Local."""
        found = self.scan()
        newest = found.committed[-1] if found.committed else None
        for step in found.torn:
            if newest is None or step > newest:
                log.warning(
                    "%s is not committed (its save did not finish) and is ignored; the newest committed "
                    "step is %s.",
                    self.location(step),
                    newest,
                )
        return newest

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        *,
        content_metadata: Any = None,
        sharded_strategy: SaveChoice = None,
        to_root: bool | None = None,
    ) -> None:
        """Save a step, then remove steps beyond `keep_last` and what older torn saves left. Collective.

        to_root says whether it goes to the root, whatever `every` says: the last step of a run should. Into
        tiers it goes before this returns, in the native format, whatever the root's strategy is.

        Raises:
            CheckpointError: as `megackpt.save`; older steps are untouched.
        """
        if step < 0:
            raise DeclarationError(f"step is {step}; steps are counted from 0.")
        group = self._ranks(self._save_options.timeout_s)
        request = SaveRequest(
            state=state,
            choose=lambda: save_strategy(sharded_strategy),
            content_metadata=content_metadata,
            plans=self._plans,
            assume_constant_structure=self._save_options.assume_constant_structure,
            spread=self._save_options.spread,
            spread_label=lambda: label_to_spread(self._save_options, self._spread_group, rank=group.rank),
        )
        self._tiers.save(step, request, group, self._save_options)
        if not (step % self.every == 0 if to_root is None else to_root):
            return
        self.wait()
        newest = max(self.steps(), default=step) if group.rank == 0 else step
        if newest > step:
            log.warning(
                "Step %s is saved although step %s exists, which stays the one that is loaded and kept as "
                "newest.",
                step,
                newest,
            )
        store = self._places.open(step_name(step))
        planned, strategy = plan_state(request, store, group, self._save_options)
        if not self.async_save:
            self._finish(step, planned, store, strategy, group)
            return
        staged: list[Planned] = []

        def stage() -> bytes:
            staged.append(self._staging.stage(planned, rank=group.rank))
            return b""

        together(group, stage, doing="copying its state to host memory")
        behind = self._behind or borrow_group(group, timeout_s=self._save_options.timeout_s)
        self._behind = behind
        self._background.start(lambda: self._finish(step, staged[0], store, strategy, behind))

    def wait(self) -> None:
        """Return when the save that is under way, if any, is committed. Every rank calls it.

        Raises:
            CheckpointError: it failed; older steps are untouched.
        """
        self._background.wait()

    @property
    def is_saving(self) -> bool:
        """Whether an asynchronous save is under way on this rank. Local."""
        return self._background.is_busy

    def load(
        self,
        state: ShardedStateDict,
        *,
        step: int | None = None,
        strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED,
    ) -> StateDict:
        """Load a step, by default the newest committed one that rank 0 finds. Collective.

        With tiers, the newest that is whole over all nodes and the root; a damaged or incomplete one is
        passed over with a warning, and `last_load` says what was used.

        Raises:
            NotACheckpointError: there is no committed step, or not the one asked for.
            CheckpointError: as `megackpt.load`.
        """
        self.wait()  # a step that is under way is the newest, and its clean-up must not cross the load
        if len(self._tiers):
            loaded, self.last_load = self._recovery(strict).load(state, step, strict, self._load_options)
            return loaded
        found = self.find_latest() if step is None else step
        if found is None:
            raise NotACheckpointError(
                f"{self.root} has no committed step. Save one, or name the directory of a run.",
                path=str(self.root),
            )
        return self._load_from_root(state, found, strict=strict)

    def find_latest(self) -> int | None:
        """Return the newest committed step as rank 0 sees it, so that all ranks choose the same. Collective.

        Waits for the save that is under way, if any. Warns of a newer step that is torn. With tiers, the
        newest step of which every byte is somewhere.

        Raises:
            CheckpointError: the save under way failed.
        """
        self.wait()
        if len(self._tiers):
            return self._recovery().find()
        group = self._ranks(self._load_options.timeout_s)

        def look() -> bytes:
            return json.dumps(self.latest() if group.rank == 0 else None).encode()

        found: int | None = json.loads(together(group, look, doing="looking for the newest checkpoint")[0])
        return found

    def content_metadata(self, step: int) -> Any:
        """Return what the step was saved with as `content_metadata`. Local."""
        trusted = self._load_options.allow_unsafe_pickle
        with contextlib.closing(self._places.open(step_name(step))) as store:
            return load_content_metadata(store, allow_unsafe_pickle=trusted)

    def close(self) -> None:
        """Wait for the save that is under way, raise its error if it failed, and let go of everything.

        Collective, if anything was saved asynchronously. The checkpointer can be used again.
        """
        try:
            self._background.close()
        finally:
            behind, self._behind = self._behind, None
            self._staging = Staging()
            if behind is not None:
                return_group(behind)

    def _load_from_root(self, state: ShardedStateDict, step: int, *, strict: ReturnsState) -> StateDict:
        with contextlib.closing(self._places.open(step_name(step))) as store:
            return load(
                state,
                store,
                strict=strict,
                options=self._load_options,
                group=self._ranks(self._load_options.timeout_s),
                exchange_group=self._exchange_group,
            )

    def _recovery(self, strict: ReturnsState = StrictHandling.ASSUME_OK_UNEXPECTED) -> Recovery:
        """Look at all tiers and the root. Collective; strict is for loads from the root."""
        root = Root(
            location=self._places.location,
            steps=lambda: self.scan().committed,
            load=partial(self._load_from_root, strict=strict),
        )
        return self._tiers.recovery(self._ranks(self._load_options.timeout_s), root)

    def _finish(
        self, step: int, planned: Planned, store: Store, strategy: SaveStrategy, group: Group
    ) -> None:
        """Write and commit a step, then remove what is not kept. Collective over the group."""
        try:
            write_out(planned, store, strategy, group)
        finally:
            store.close()
        together(group, lambda: self._on_root(group, lambda: self._clean(step)), doing="removing old steps")

    def _ranks(self, timeout_s: float) -> Group:
        return self._group or world_group(timeout_s=timeout_s)

    def _on_root(self, group: Group, act: Callable[[], None]) -> bytes:
        if group.rank == 0:
            act()
        return b""

    def _clean(self, saved: int) -> None:
        """Remove torn steps up to this one and those beyond `keep_last`.

        A newer torn step may be a save of another job that is under way. What cannot be removed stays for
        the next time.
        """
        found = self.scan()
        surplus = found.committed[: -self.keep_last] if self.keep_last else ()
        for step in (*(s for s in surplus if s != saved), *(s for s in found.torn if s <= saved)):
            with contextlib.suppress(OSError):
                self._places.remove(step_name(step))
                log.info("removed %s", self.location(step))


def _steps_of(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(sorted(step for name in names if (step := step_of(name)) is not None))
