"""What a Checkpointer was given: checked when it is made, and compared between ranks before they first act.

Owns which arguments all ranks must be given alike. A rank that alone saves asynchronously, into tiers, or at
another interval would leave the others waiting for it, or remove what they keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megackpt.arguments import check_count, check_flag, check_kind
from megackpt.checkpointer.interval import SaveInterval
from megackpt.checkpointer.retention import RetentionPolicy
from megackpt.checkpointer.tiers import Tier, check_tiers
from megackpt.comm import Group, check_group, check_group_argument
from megackpt.engine.saving.settings import compare_settings
from megackpt.errors import DeclarationError
from megackpt.options import AsyncOptions, LoadOptions, SaveOptions
from megackpt.storage import ObjectOptions, absolute_path

_NODE = "give the name or the number of this rank's node, or None to find it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Arguments of a Checkpointer, under their names there, that can be checked and compared.

    Attributes:
        root: the directory or the URL, absolute; None for a store, which each rank may call by another name.
        policy: which steps stay.
        interval: when to save.
        save_on_signal: numbers of signals.
    """

    root: str | None
    policy: RetentionPolicy
    interval: SaveInterval
    save_on_signal: tuple[int, ...] = ()
    on_error: str = "raise"
    verify_after_save: bool = False
    async_save: bool = False
    async_options: AsyncOptions | None = None
    tiers: tuple[Tier, ...] = ()
    every: int = 1
    save_options: SaveOptions
    load_options: LoadOptions

    def compare(self, group: Group) -> None:
        """Refuse ranks that were given different arguments. Collective.

        Raises:
            DeclarationError: the same on every rank; it names the first that differs.
            RankFailedError: a rank did not come, or is about to do something else.
        """
        if group.size > 1:
            compare_settings(
                group,
                self._said(),
                what="Ranks have different Checkpointers",
                doing="comparing what their Checkpointers were given",
            )

    def _said(self) -> dict[str, Any]:
        best = self.policy.keep_best
        busy = (self.async_options or AsyncOptions()).when_busy
        return {
            "root": self.root,
            "async_save": self.async_save,
            "AsyncOptions.when_busy": busy if self.async_save else None,
            "tiers": [_tier_said(tier) for tier in self.tiers],
            "every": self.every,
            "save_interval": _interval_said(self.interval),
            "save_on_signal": list(self.save_on_signal),
            "timeout_s (SaveOptions)": float(self.save_options.timeout_s),
            "timeout_s (LoadOptions)": float(self.load_options.timeout_s),
            "on_error": self.on_error,
            "verify_after_save": self.verify_after_save,
            "keep_last": self.policy.keep_last,
            "keep_every": self.policy.keep_every,
            "keep_best": None if best is None else [best.metric, best.n, best.mode],
        }


def check_given(
    *,
    verify_after_save: object,
    async_save: object,
    async_options: object,
    tiers: object,
    every: object,
    node: object,
    save_options: object,
    load_options: object,
    group: object,
    spread_group: object,
    exchange_group: object,
    objects: object,
) -> None:
    """Check arguments of a Checkpointer that nothing else checks. Local, pure.

    Raises:
        DeclarationError: one of them is not what it has to be.
    """
    check_flag("verify_after_save", verify_after_save)
    check_flag("async_save", async_save)
    check_count("every", every, otherwise=": steps that are multiples of it go to the root")
    check_tiers(tiers)
    if node == "" or isinstance(node, bool):
        raise DeclarationError(f"node is {node!r}; {_NODE}.")
    check_kind("node", node, (str, int), give=_NODE, optional=True)
    for name, given, kind in (
        ("async_options", async_options, AsyncOptions),
        ("save_options", save_options, SaveOptions),
        ("load_options", load_options, LoadOptions),
        ("objects", objects, ObjectOptions),
    ):
        check_kind(name, given, kind, give=f"{kind.__name__}(...), or None", optional=True)
    if group is not None:
        check_group(group)
    for name, given in (("spread_group", spread_group), ("exchange_group", exchange_group)):
        if given is not None:
            check_group_argument(name, given)


def _tier_said(tier: Tier) -> list[object]:
    kept = [tier.every, tier.keep_last, tier.replication_factor, tier.jump]
    return [type(tier).__name__, absolute_path(tier.path), *kept]


def _interval_said(interval: SaveInterval) -> list[float | None]:
    return [interval.steps, *(None if s is None else float(s) for s in (interval.seconds, interval.agree_s))]
