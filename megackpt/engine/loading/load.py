"""A load: open the checkpoint, view it under the names of the request, check, plan, read, rebuild the state.

Every rank reads the bytes that it needs. Ranks synchronise only to compare requests and to share errors.
`source.open_source` chooses the source of the bytes (for a damaged checkpoint also parity and copies), and
`connect_reader` chooses the ranks that read them. Maps, missing keys and complete requests have modules of
their own, imported where they are asked for.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from megackpt.comm import Group, gather_step
from megackpt.engine.data.read import read_chunk, read_tensors
from megackpt.engine.loading.prepare import CheckpointView, prepare_load
from megackpt.engine.loading.prepared_load import PreparedLoad, ReadResult
from megackpt.engine.loading.rank_answers import RankAnswers, answer_of, check_answers
from megackpt.engine.loading.source import LoadRequest, open_source
from megackpt.entities import StateDict
from megackpt.errors import RankFailedError, truncated_list
from megackpt.ground.notices import collected_notices, log_notices
from megackpt.options import Exchange, LoadOptions, Policy
from megackpt.plans.validation import LoadReport, LoadRules, LoadTimes, PhaseTimes, StrictHandling

if TYPE_CHECKING:
    from megackpt.engine.loading.exchange import ExchangeReader


log = logging.getLogger(__name__)

MAX_READ_RATIO = 1.05
"""With exchange="auto", ranks read for each other if one of them would read more than this many times the
bytes that it needs."""


def load_state(request: LoadRequest, group: Group) -> tuple[StateDict, LoadReport]:
    """Load into a sharded state dict; return the loaded one, and the report of this rank. Collective.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may have any content.
    """
    with ExitStack() as resources:
        with gather_step(group, "preparing the load", on_all_ranks=True) as preparing:
            prepared, preparing.data = _open_and_prepare(request, group, resources)
        ranks = check_answers(preparing.results, prepared.where)
        if group.rank == 0:
            # Most notices are those of all ranks. Rank 0 logs each text once.
            log_notices(ranks.values("notices"))
            # A pattern may be for keys that only some ranks ask for.
            for pattern in sorted(set.intersection(*map(set, ranks.values("idle_patterns")))):
                log.warning("%s: %s matches no key, stored or requested.", prepared.where, pattern)
        missing: frozenset[str] = frozenset()
        # `check_answers` has shown that the rules are equal, and a union is the same on all ranks. So all of
        # them make the collectives below, or none does.
        empty = ranks.union("empty_containers")
        if prepared.rules.looks_for_missing_keys or empty:
            from megackpt.engine.loading.request_coverage import find_missing_keys

            missing = find_missing_keys(
                prepared, group, requested=ranks.union("requested"), empty_containers=empty
            )
        if request.options.complete:
            from megackpt.engine.loading.request_coverage import check_request_coverage

            check_request_coverage(prepared, group)

        request = _with_chosen_exchange(request, ranks)
        reader = connect_reader(request, prepared, group)
        with gather_step(group, "reading", on_all_ranks=True) as reading:
            state, reading.data = _read_and_finish(prepared, reader)
        # A rank with an empty message expects the error of another one. Here no rank has raised any.
        if not all(reading.results):
            raise RankFailedError(
                f"{prepared.where}: the exchange between ranks broke off before all bytes had arrived. Load "
                f"again."
            )

        times = LoadTimes.over([PhaseTimes(*json.loads(message)) for message in reading.results])
        report = replace(prepared.report, missing=missing, recovered=prepared.source.recovered, times=times)
        _log_result(request, prepared, report, group)
        return state, report


def _open_and_prepare(request: LoadRequest, group: Group, resources: ExitStack) -> tuple[PreparedLoad, bytes]:
    """Do all steps that need no other rank and read no tensor; return the message that ranks compare."""
    options = request.options
    strict = StrictHandling.of(request.strict)
    # With a map, an array that no rank requests means that the model is not the stored one.
    needs_all = request.maps is not None and strict.on_unexpected is Policy.ERROR
    rules = LoadRules(options.rules, strict, complete=options.complete or needs_all)
    if request.exchange_group is not None or not options.cpu_transfer:
        from megackpt.engine.loading.exchange import check_exchange_group

        check_exchange_group(options, request.exchange_group, has_map=request.maps is not None)
    with collected_notices() as notices:
        store = resources.enter_context(request.open_store())
        source = open_source(store, options, resources)
        if request.maps is None:
            view = CheckpointView.from_source(source, request.state, options, rules)
        else:
            from megackpt.engine.loading.mapped import MappedView

            view = MappedView.from_request(request, source, rules)
        prepared = prepare_load(view, request.state, group)
    return prepared, answer_of(request, prepared, notices)


def _with_chosen_exchange(request: LoadRequest, ranks: RankAnswers) -> LoadRequest:
    """Return the request with another mode in place of exchange="auto": the same mode on all ranks."""
    # From the numbers of all ranks, so that no rank waits in an exchange that another one does not make.
    ratios = ranks.values("read_ratio")
    if request.options.exchange != "auto":
        return request
    mode: Exchange = "all_to_all" if len(ratios) > 1 and max(ratios) > MAX_READ_RATIO else "direct"
    return replace(request, options=replace(request.options, exchange=mode))


def _read_and_finish(prepared: PreparedLoad, reader: Reader) -> tuple[StateDict, bytes]:
    """Fill the tensors; return the loaded state dict, and a message with the times of this rank.

    The message is empty if another rank failed, which raises its own error.
    """
    # Before the read, which fills only what the checkpoint has of these tensors.
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


Reader: TypeAlias = "DirectReader | ExchangeReader"
"""Has a method `read(prepared)`, which fills the tensors and returns a `ReadResult`. It returns None if
another rank has failed; that rank raises its own error."""


@dataclass(frozen=True, slots=True)
class DirectReader:
    """Reads the bytes of this rank's request; no rank waits for another."""

    options: LoadOptions

    def read(self, prepared: PreparedLoad) -> ReadResult:
        """Fill the tensors of a load and return the bytes of its objects. Local."""
        plan, began = prepared.plan, time.perf_counter()
        read_tensors(plan.chunks, plan.copies, plan.tensors, self.options)
        object_bytes = [read_chunk(plan.chunks, row) for row in plan.object_rows]
        return ReadResult(object_bytes, PhaseTimes(read=time.perf_counter() - began))


def connect_reader(request: LoadRequest, prepared: PreparedLoad, group: Group) -> Reader:
    """Return the reader of a load. Collective over the group, unless each rank reads for itself.

    Raises:
        CheckpointError: the ranks that exchange could not be connected; the same on every rank.
    """
    if request.options.exchange == "direct":
        return DirectReader(request.options)
    from megackpt.engine.loading.exchange import connect_exchange

    return connect_exchange(request, prepared, group) or DirectReader(request.options)
