"""One step on its way into tiers: written by the ranks, or staged for their writer processes.

Owns what becomes of a tier that refuses a step: it is a warning, the step is missing there, and older ones
stay. How it is written is `engine.tiers.save`'s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megackpt.checkpointer.options import Tier
from megackpt.checkpointer.tier_set import TierSet
from megackpt.comm import Group, Numbers, run_and_compare
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.checkpoint.steps import LocalSteps, step_of
from megackpt.engine.saving.save import SaveRequest, plan_state
from megackpt.engine.tiers.save import NodeLocation, clean_node, save_on_nodes
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.formats.registry import save_strategy
from megackpt.options import SaveOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierSaving:
    """Saves into tiers that return when the nodes have committed.

    Attributes:
        tiers: those of the run.
        options: of the saves.
    """

    tiers: TierSet
    options: SaveOptions

    def save(self, step: int, due: Iterable[int], request: SaveRequest, group: Group) -> bool:
        """Save a step into the tiers that have these numbers; return whether one of them has it. Collective.

        Raises:
            CheckpointError: the state is at fault, or a rank was lost; the same on every rank.
        """
        native, is_saved = in_native_format(request), False
        for number in due:
            place = self.tiers.place(number, step, group)
            try:
                self._save(place, native, group)
                is_saved = True
                if group.rank == 0:
                    warn_of_newer(place, self.tiers[number])
            except StorageError as error:
                warn_of_refusal(place, self.tiers[number], error, rank=group.rank)
        return is_saved

    def _save(self, place: NodeLocation, request: SaveRequest, group: Group) -> None:
        planned, strategy = plan_state(request, None, group, self.options)
        with contextlib.closing(place.open()) as store:
            save_on_nodes(planned, store, strategy, group, place)

        def clean() -> Numbers:
            clean_node(place, rank=group.rank)
            return Numbers(())

        run_and_compare(group, clean, equal=0, doing="removing old steps from its node")


def destinations_in_tiers(
    tiers: TierSet, due: Iterable[int], step: int, request: SaveRequest, group: Group
) -> Iterator[Destination]:
    """Yield where a step goes in the tiers that have these numbers. Collective at the first call in a run.

    Raises:
        DeclarationError: as `TierSet.open`; or the group cannot send files.
    """
    native = in_native_format(request)
    for number in due:
        yield _destination(tiers.place(number, step, group), tiers[number], native, group)


def _destination(place: NodeLocation, tier: Tier, request: SaveRequest, group: Group) -> Destination:
    def follow(_: Sequence[Damage] | None) -> None:
        warn_of_newer(place, tier)

    def failed(error: Exception) -> bool:
        if not isinstance(error, StorageError):
            return False
        warn_of_refusal(place, tier, error, rank=group.rank)
        return True

    return Destination(
        request=request,
        place=place,
        label=f"step {place.step} in {tier}",
        follow=follow,
        failed=failed,
    )


def in_native_format(request: SaveRequest) -> SaveRequest:
    """Return the request for a tier: its format is the native one, whatever the root's is."""
    return replace(request, choose=lambda: save_strategy(None), not_imported=lambda: None)


def warn_of_refusal(place: NodeLocation, tier: Tier, error: StorageError, *, rank: int) -> None:
    """Say, on rank 0, that a tier does not have a step."""
    if rank == 0:
        log.warning(
            "Step %s is not in %s, which goes on with older ones: %s", place.step, tier, error,
        )  # fmt: skip


def warn_of_newer(place: NodeLocation, tier: Tier) -> None:
    """Say that a step will not be the newest of a tier, if this node has a newer one. Local."""
    with contextlib.suppress(OSError):
        names = LocalSteps.at(place.root).names()
        newest = max((found for name in names if (found := step_of(name)) is not None), default=place.step)
        if newest > place.step:
            log.warning(
                "Step %s goes into %s although step %s is there, which stays the one that is loaded.",
                place.step, tier, newest,
            )  # fmt: skip
