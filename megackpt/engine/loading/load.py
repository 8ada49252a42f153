"""A load, as a recipe: open, flatten the request, check, plan, read, put together.

Every rank reads what it needs. Ranks synchronise only to compare what they load, and to make errors common.
Options hang on two hooks: `open_source` chooses where bytes come from (parity and copies of a damaged
checkpoint), `connect_reader` who reads them (ranks that read for each other).
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace

from megackpt.comm import Group, run_and_all_gather
from megackpt.engine.loading.prepare import LoadRequest, PreparedLoad, prepare_load
from megackpt.engine.loading.rank_checks import (
    answer_of,
    check_answers,
    check_empty_requests,
    find_missing_keys,
)
from megackpt.engine.loading.reading import Reader, check_exchange_group, connect_reader
from megackpt.engine.loading.request_coverage import check_request_coverage
from megackpt.engine.loading.source import open_source
from megackpt.errors import RankFailedError, truncated_list
from megackpt.mapping import StateDict
from megackpt.notices import collected_notices, log_notices
from megackpt.validation import LoadReport, LoadRules, LoadTimes, PhaseTimes, StrictHandling

__all__ = ["LoadRequest", "LoadResult", "load_state"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load returns.

    Attributes:
        state: the loaded state dict.
        report: what was done, as this rank saw it.
    """

    state: StateDict
    report: LoadReport


def load_state(request: LoadRequest, group: Group) -> LoadResult:
    """Load into a sharded state dict. Collective over the group.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may hold anything.
    """
    with ExitStack() as resources:
        prepared, messages = run_and_all_gather(
            group, lambda: _open_and_prepare(request, group, resources), doing="preparing the load"
        )
        ranks = check_answers(messages, prepared.where)
        if group.rank == 0:
            log_notices(ranks.values("notices"))
        check_empty_requests(prepared, ranks, group)
        missing = find_missing_keys(prepared, ranks, group)
        if request.options.complete:
            check_request_coverage(prepared, group)

        reader = connect_reader(request, prepared, group)
        state, messages = run_and_all_gather(
            group, lambda: _read_and_finish(prepared, reader), doing="reading"
        )
        if not all(messages):
            raise RankFailedError(f"{prepared.where}: the exchange of what was read broke off. Load again.")

        times = LoadTimes.over([PhaseTimes(*json.loads(message)) for message in messages])
        report = replace(prepared.report, missing=missing, recovered=prepared.source.recovered, times=times)
        _log_result(request, prepared, report, group)
        return LoadResult(state, report)


def _open_and_prepare(request: LoadRequest, group: Group, resources: ExitStack) -> tuple[PreparedLoad, bytes]:
    """Do everything that needs no other rank and reads no tensor; return what the other ranks compare."""
    options = request.options
    rules = LoadRules(options.rules, StrictHandling.of(request.strict), complete=options.complete)
    check_exchange_group(options, request.exchange_group)
    with collected_notices() as notices:
        store = resources.enter_context(request.open_store())
        source = open_source(store, options, resources)
        prepared = prepare_load(request.state, source, options, rules, group)
    return prepared, answer_of(request, prepared, notices)


def _read_and_finish(prepared: PreparedLoad, reader: Reader) -> tuple[StateDict, bytes]:
    """Fill the tensors and return the loaded state dict; the message has the times of this rank.

    If another rank failed, which raises its error itself, the message is empty.
    """
    prepared.clear_padding()
    result = reader.read(prepared)
    if result is None:
        return {}, b""
    times = result.times
    return prepared.finish(result.object_bytes), json.dumps([times.read, times.exchange, times.copy]).encode()


def _log_result(request: LoadRequest, prepared: PreparedLoad, report: LoadReport, group: Group) -> None:
    if request.options.exchange != "direct" and group.rank == 0:
        log.info("%s: loaded by %s. %s", prepared.where, request.options.exchange, report.times)
    if report.recovered:
        log.warning(
            "%s is damaged; rank %d has loaded from elsewhere:\n%s",
            prepared.where,
            group.rank,
            truncated_list([str(record) for record in report.recovered]),
        )
