"""Comparisons of what all ranks of a load request together with what the checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megackpt.codec import leaf_digests
from megackpt.comm import Group, gather_step, join_fields, rank_0_errors_on_all_ranks, split_fields
from megackpt.engine.checkpoint.common_arrays import map_common, parents_of_parts
from megackpt.engine.loading.prepared_load import PreparedLoad
from megackpt.entities.describe import describe
from megackpt.entities.tree import ABSENT, Steps, keys_by_container, without_empty
from megackpt.ground.notices import collected_notices, log_notices
from megackpt.plans.metadata import PackedDeclarations, merge_packed_declarations, pack_declarations
from megackpt.plans.planning.replicas import choose_main_replicas
from megackpt.plans.validation import check_common_equal, check_merged_coverage
from megackpt.plans.validation.equality import absent_parts, fill_absent_parts
from megackpt.plans.validation.missing import check_empty_containers, check_missing_keys
from megackpt.storage import digest_of

_DOING = "comparing requests"


def check_request_coverage(prepared: PreparedLoad, group: Group) -> None:
    """Prove that main replicas of all ranks request every element of every requested array once. Collective.

    Plain tensors, which every rank requests as a whole, and objects are not part of the proof. Common state
    of the request must be equal on all ranks that have it, tensors aside, though it is not loaded into: a
    stage table in it shows ranks that disagree about the stages.

    Raises:
        CoverageError: names the elements that no rank requests, or several, and the ranks.
        MismatchError: ranks request an array with different shapes or dtypes.
        CommonStateError: names the leaves of common state that differ, and the ranks.
    """
    _check_common(prepared, group)
    packed = _packed_request(prepared, group.rank)
    with gather_step(group, _DOING, on_all_ranks=True) as comparing:
        comparing.data = digest_of(packed.replica_rows).encode()
    # The lowest of the ranks with equal replicas sends the rows of all.
    is_first = comparing.results.index(comparing.data) == group.rank
    with gather_step(group, _DOING) as gathering:
        gathering.data = join_fields([packed.main_rows, packed.replica_rows if is_first else b""])
    with rank_0_errors_on_all_ranks(group, _DOING):
        if group.rank == 0:
            _check(gathering.results, comparing.results)


def _check_common(prepared: PreparedLoad, group: Group) -> None:
    with gather_step(group, _DOING, on_all_ranks=True) as comparing:
        comparing.data = digest_of(_common_digests(prepared)).encode()
    # The usual case: common state is equal, and no leaf has to be sent.
    if len(set(comparing.results)) == 1:
        return
    with gather_step(group, _DOING) as gathering:
        parents = json.dumps(parents_of_parts(prepared.request.flattened.common)).encode()
        gathering.data = join_fields([_common_digests(prepared), parents])
    with rank_0_errors_on_all_ranks(group, _DOING):
        if group.rank == 0:
            sent = [[json.loads(field) for field in split_fields(message)] for message in gathering.results]
            absent = absent_parts([parents for _, parents in sent])
            filled = fill_absent_parts([digests for digests, _ in sent], absent)
            check_common_equal(filled, requested=True)


def _common_digests(prepared: PreparedLoad) -> bytes:
    """Return digests of the leaves of common state of the request, without tensors, as sorted JSON."""
    common = without_empty(map_common(_without_tensor, prepared.request.flattened.common))
    return json.dumps({} if common is ABSENT else leaf_digests(common), sort_keys=True).encode()


def _without_tensor(steps: Steps, leaf: Any) -> Any:
    return ABSENT if isinstance(leaf, torch.Tensor) else leaf


def _packed_request(prepared: PreparedLoad, rank: int) -> PackedDeclarations:
    flattened = prepared.request.flattened
    not_proved = prepared.keys.left_out | prepared.request.common.unanswered
    tensors = [tensor for tensor in flattened.tensors if tensor.key not in not_proved]
    return pack_declarations(
        describe(tensors, rank=rank), replicated=flattened.replicated, on_some_ranks=flattened.on_some_ranks
    )


def _check(messages: Sequence[bytes], digests: Sequence[bytes]) -> None:
    rows_of_ranks = [split_fields(message) for message in messages]
    ranks_of_digest: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks_of_digest.setdefault(digest, []).append(rank)
    # In the order of ranks, so the first rank of a group is the one that has sent the rows.
    owner_groups = list(ranks_of_digest.values())
    merged, marks = merge_packed_declarations(
        [main_rows for main_rows, _ in rows_of_ranks],
        [rows_of_ranks[ranks[0]][1] for ranks in owner_groups],  # sent by the lowest rank
        [np.array(ranks, np.int64) for ranks in owner_groups],
    )
    merged = choose_main_replicas(merged, marks)
    check_merged_coverage(merged, doing="requested")


# Stored keys that no rank requests.
#
# A mode or a rule asks for this comparison, or an empty dict or list in a request.


def find_missing_keys(
    prepared: PreparedLoad, group: Group, *, requested: set[str], empty_containers: set[str]
) -> frozenset[str]:
    """Check the keys below empty containers; return the missing keys if a rule looks for them. Collective.

    `requested` and `empty_containers` are the unions over all ranks.

    Raises:
        MissingKeyError: a rule makes a missing key an error; the same on every rank.
    """
    _check_empty_containers(prepared, empty_containers, group)
    return _missing_keys(prepared, requested, group)


def _missing_keys(prepared: PreparedLoad, requested: set[str], group: Group) -> frozenset[str]:
    """Return the stored keys that no rank requests, if a rule looks for them. All ranks call it.

    Raises:
        MissingKeyError: a rule makes a missing key an error; the same on every rank.
    """
    rules, by_map = prepared.rules, prepared.plan.by_map
    if not rules.looks_for_missing_keys:
        return frozenset()
    with collected_notices() as notices:  # the same on all ranks
        missing = check_missing_keys(
            requested,
            prepared.contents.arrays,
            rules,
            where=prepared.where,
            our_names=None if by_map is None else by_map.our_names,
        )
    if group.rank == 0:
        log_notices([notices])
    return missing


def _check_empty_containers(prepared: PreparedLoad, names: set[str], group: Group) -> None:
    """Check the keys stored below empty dicts and lists of the request. Collective.

    What one rank leaves empty another may request: the stages of a pipeline. So the requested keys below
    these containers are gathered, where a rank has any.

    Raises:
        MissingKeyError: no rank requests a key there, and a rule makes that an error.
    """
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
