"""Names of the cases and figures that only this benchmark has, in tables, in JSON and by the goals."""

from megackpt.cli.benchmark.report import OURS

ASYNC_STALL = "async, stall"
ASYNC_TOTAL = "async, total"
SMALL_SAVE = "small state, save"
SMALL_LOAD = "small state, load"

UNCHECKED = f"{OURS}, no digests"

MEMORY = "memory beyond the state"  # and what was done; of the rank that took most
DIGESTS = "cost of digests"
DOUBT = ", give or take"  # ends the name of a figure's own error
HASH = "digests alone, share of"
SCALING = "throughput of {ranks} ranks to that of 1"
PLAN_FIRST = "planning of a first save"
PLAN_AGAIN = "planning of a save like the last"
COLLECTIVES = "collectives of planning a save like the last"
COLLECTIVES_SAVE = "collectives of a save like the last"
SLOPE = "growth of resident memory"
DESCRIPTORS = "descriptors left open"


def scaling_case(case: str, ranks: int) -> str:
    """Return the name of a case that is done by one rank or by all, to compare them."""
    return f"{case}, {ranks} rank{'s' if ranks > 1 else ''}"
