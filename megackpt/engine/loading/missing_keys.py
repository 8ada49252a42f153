"""Stored keys that no rank requests.

A mode or a rule asks for this comparison, or an empty dict or list in a request.
"""

from __future__ import annotations

import json

from megackpt.comm import Group, gather_step
from megackpt.engine.loading.prepared_load import PreparedLoad
from megackpt.engine.loading.rank_checks import RankAnswers
from megackpt.entities.tree import keys_by_container
from megackpt.ground.notices import collected_notices, log_notices
from megackpt.plans.validation.missing import check_empty_containers, check_missing_keys


def find_missing_keys(prepared: PreparedLoad, ranks: RankAnswers, group: Group) -> frozenset[str]:
    """Check the keys below empty containers; return the missing keys if a rule looks for them. Collective.

    Raises:
        MissingKeyError: a rule makes a missing key an error; the same on every rank.
    """
    _check_empty_containers(prepared, ranks, group)
    return _missing_keys(prepared, ranks, group)


def _missing_keys(prepared: PreparedLoad, ranks: RankAnswers, group: Group) -> frozenset[str]:
    """Return the stored keys that no rank requests, if a rule looks for them. All ranks call it.

    Raises:
        MissingKeyError: a rule makes a missing key an error; the same on every rank.
    """
    rules = prepared.rules
    if not rules.look_for_missing_keys:
        return frozenset()
    with collected_notices() as notices:  # the same on all ranks
        missing = check_missing_keys(
            ranks.union("requested"),
            prepared.contents.arrays,
            rules,
            where=prepared.where,
            our_names=prepared.our_names,
        )
    if group.rank == 0:
        log_notices([notices])
    return missing


def _check_empty_containers(prepared: PreparedLoad, ranks: RankAnswers, group: Group) -> None:
    """Check the keys stored below empty dicts and lists of the request. Collective.

    What one rank leaves empty another may request: the stages of a pipeline. So the requested keys below
    these containers are gathered, where a rank has any.

    Raises:
        MissingKeyError: no rank requests a key there, and a rule makes that an error.
    """
    names = ranks.union("empty_containers")
    # The union of all ranks: all of them return here, or none does.
    if not names:
        return
    doing = "comparing keys"

    with gather_step(group, doing, on_all_ranks=True) as comparing:
        by_name = keys_by_container(sorted(prepared.keys.requested), names)
        comparing.data = json.dumps([key for keys in by_name.values() for key in keys]).encode()
    requested = {key for keys in comparing.results for key in json.loads(keys)}
    with gather_step(group, doing) as checking:
        with collected_notices() as notices:
            stored_below = keys_by_container(prepared.loadable, names, requested)
            check_empty_containers(stored_below, prepared.rules, where=prepared.where)
        checking.data = json.dumps(notices).encode()
    log_notices([json.loads(of_rank) for of_rank in checking.results])
