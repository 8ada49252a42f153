"""Parity in a save: after all chunks are written, before the commit.

Owns the meetings that it takes. What is computed from what is the format's affair.
"""

from __future__ import annotations

from collections.abc import Callable

from megackpt.comm import Group, run_and_gather, scatter_from_rank_0
from megackpt.errors import UnsupportedError
from megackpt.formats.strategy import SaveStrategy
from megackpt.planning import SavePlan
from megackpt.storage import Store


def check_parity(strategy: SaveStrategy, most: int | None) -> None:
    """Refuse parity for a format that has none.

    Raises:
        UnsupportedError: it has none.
    """
    if most is not None and not strategy.capabilities.writes_parity:
        raise UnsupportedError(
            f"Format {strategy.backend} version {strategy.version} has no parity files. Save without "
            f"SaveOptions.parity, or in the native format."
        )


def write_parity(
    store: Store,
    strategy: SaveStrategy,
    group: Group,
    *,
    attempt: str,
    most: int,
    written: Callable[[], tuple[SavePlan, list[list[bytes]]]],
) -> list[bytes]:
    """Protect what was written; return, on rank 0, the receipts by rank for `list_parity`. Collective.

    written gives, on rank 0, the plan of all ranks and their receipts, by rank and round.

    Raises:
        CheckpointError: the same on every rank.
    """
    assert strategy.capabilities.writes_parity  # checked before anything was written

    def plan() -> list[bytes]:
        whole, receipts = written()
        return strategy.plan_parity(attempt=attempt, plan=whole, receipts=receipts, most=most)

    work = scatter_from_rank_0(group, plan, doing="planning parity")
    return run_and_gather(
        group,
        lambda: strategy.write_parity(store, attempt=attempt, work=work),
        doing="writing parity files",
    )
