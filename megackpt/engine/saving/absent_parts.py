"""Parts of common state that only some ranks have, as the groups of an optimizer of a module of these ranks.

Rank 0 stores common state, so the lowest rank that has such a part sends it there. The ranks that have it are
compared with each other.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megackpt.codec import pack, unpack
from megackpt.comm import Group, gather_step, rank_0_errors_on_all_ranks
from megackpt.engine.checkpoint.common_arrays import common_parts, parents_of_parts
from megackpt.engine.saving.local_state import LocalState
from megackpt.entities.tree import ABSENT, Steps, without_empty
from megackpt.errors import rank_list
from megackpt.ground.notices import notice
from megackpt.plans.validation.equality import absent_parts

log = logging.getLogger(__name__)

_GATHERING = "gathering common state"


def with_absent_parts(local: LocalState, group: Group, *, is_assumed: bool) -> LocalState:
    """Return the state of this rank, on rank 0 with the parts of common state that it lacks. Collective.

    Args:
        local: the state of this rank. Digests have not shown its common state to be equal on all ranks.
        group: the ranks.
        is_assumed: whether all ranks assume the structure of the last save, and so its parts.

    Raises:
        CheckpointError: the same on every rank: a part has no codec in this format.
    """
    plans = local.request.plans
    if is_assumed:
        absent = {} if plans is None else plans.absent_parts
    else:
        with gather_step(group, "comparing common state", on_all_ranks=True) as comparing:
            comparing.data = json.dumps(parents_of_parts(local.common)).encode()
        parents_of_ranks = [json.loads(parents) for parents in comparing.results]
        absent = absent_parts(parents_of_ranks)
        _warn(local, absent, parents_of_ranks)
        if plans is not None:
            plans.absent_parts = absent
    if not absent:
        return local
    with gather_step(group, _GATHERING) as gathering:
        own = {path for path, owner in absent.items() if owner == group.rank != 0}
        parts = [[list(steps), part] for path, steps, part in common_parts(local.common) if path in own]
        gathering.data = pack(parts) if parts else b""
    with rank_0_errors_on_all_ranks(group, _GATHERING):
        if group.rank == 0:
            common = local.common
            for rank, packed in enumerate(gathering.results):
                sent: Any = unpack(packed, where=f"common state of rank {rank}") if packed else []
                for steps, part in sent:
                    common = _with_part(common, tuple(steps), part)
            content = local.request.content_metadata
            local.strategy.check_common({"state_dict": common, "content_metadata": content})
            local = replace(local, common=common)
    return replace(local, absent_parts=absent)


def _with_part(common: Any, steps: Steps, part: dict[Any, Any]) -> Any:
    """Return common state with a part at some steps; what is around it is copied.

    A value that rank 0 has there stays. Then the comparison that follows finds the difference.
    """
    if common is not ABSENT and not isinstance(common, dict):
        return common
    if not steps:
        return part if common is ABSENT or without_empty(common) is ABSENT else common
    copied: dict[Any, Any] = copy.copy(common) if isinstance(common, dict) else {}
    copied[steps[0]] = _with_part(copied.get(steps[0], ABSENT), steps[1:], part)
    return copied


def _warn(local: LocalState, absent: Mapping[str, int], parents_of_ranks: list[Mapping[str, str]]) -> None:
    """Log which ranks lack a part, on rank 0, once for a cache of plans."""
    known = set() if local.request.plans is None else local.request.plans.known_warnings
    for path, owner in absent.items() if local.rank == 0 else ():
        without = [rank for rank, parents in enumerate(parents_of_ranks) if path not in parents]
        text = (
            f"{path!r} of common state is on some ranks only: rank(s) {rank_list(without)} have nothing "
            f"there, and what rank {owner} has is stored."
        )
        if text not in known:
            notice(log, text)
        known.add(text)
