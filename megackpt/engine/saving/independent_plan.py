"""The plan of a save without validation: ranks exchange nothing before they write; each plans by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.comm import Group
from megackpt.engine.saving.local_state import LocalState
from megackpt.engine.saving.plan_agreement import PlanAgreement
from megackpt.plans.metadata import pack_columns, unpack_columns
from megackpt.plans.metadata.merge import decode_declarations, merge_declarations
from megackpt.plans.planning import SavePlan, plan_main_replicas
from megackpt.plans.planning.main_replicas import choose_lowest_rank_as_main


@dataclass(frozen=True, slots=True)
class CompletionFromDeclarations:
    """Makes the plan of all ranks from the declarations by which each has planned independently."""

    def __call__(self, reports: Sequence[bytes]) -> SavePlan:
        """Return the plan; each report is a rank's declarations."""
        columns = [
            unpack_columns(report, where=f"declarations of rank {rank}")
            for rank, report in enumerate(reports)
        ]
        return plan_main_replicas(merge_declarations(decode_declarations(columns)))


def plan_independently(local: LocalState, group: Group) -> PlanAgreement:
    """Plan from this rank's declarations only; rank 0 receives those of other ranks after all have written.

    No rank knows which others hold a replicated value, so each of them stores it.
    """
    declared = choose_lowest_rank_as_main(local.declared, set(local.flattened.replicated))
    complete = CompletionFromDeclarations() if group.rank == 0 else None
    return PlanAgreement(
        plan_main_replicas(declared), report=pack_columns(declared.to_columns()), complete=complete
    )
