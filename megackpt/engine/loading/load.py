"""A load, as a recipe: open, describe, check, plan, read, put together.

Owns the order of the steps, and where ranks meet. Every rank reads what it needs by itself, and ranks meet
only to make failures common; or ranks read together and exchange, which is `exchange`'s affair.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from megackpt.comm import AnyGroup, Group, run_on_all_ranks, subgroup_members
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.engine.loading.agreement import check_alike, check_exchange, exchange_ranks
from megackpt.engine.loading.exchange import ExchangeRanks
from megackpt.engine.loading.fallback import Fallback
from megackpt.engine.loading.prepare import PreparedLoad
from megackpt.errors import RankFailedError, truncated_list
from megackpt.mapping import ShardedStateDict, StateDict
from megackpt.notices import collected_notices, log_notices
from megackpt.options import LoadOptions
from megackpt.storage import Store
from megackpt.validation import (
    LoadReport,
    LoadRules,
    LoadTimes,
    PhaseTimes,
    StrictHandling,
    check_empty_containers,
    check_missing_keys,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load gives.

    Attributes:
        state: the loaded state dict.
        report: what was done, as this rank saw it.
    """

    state: StateDict
    report: LoadReport


def load_state(
    state: ShardedStateDict,
    open_store: Callable[[], Store],
    group: Group,
    options: LoadOptions,
    strict: StrictHandling | str,
    *,
    exchange_group: AnyGroup | None = None,
    holders: Mapping[str, Sequence[int]] | None = None,
) -> LoadResult:
    """Load into a sharded state dict. Collective over the group.

    Arguments are checked here, where a failure becomes common. exchange_group are the ranks of the group,
    this one among them, that exchange what they read; None for all. holders are those of `ExchangeRanks`.

    Raises:
        CheckpointError: the same on every rank. If reading had begun, the given tensors may hold anything.
    """
    with ExitStack() as opened:
        return _load(state, open_store, group, options, strict, exchange_group, holders, opened)


def _load(
    state: ShardedStateDict,
    open_store: Callable[[], Store],
    group: Group,
    options: LoadOptions,
    strict: StrictHandling | str,
    exchange_group: AnyGroup | None,
    holders: Mapping[str, Sequence[int]] | None,
    opened: ExitStack,
) -> LoadResult:
    prepared: list[PreparedLoad] = []
    exchanging: list[ExchangeRanks] = []
    loaded: list[StateDict] = []

    def prepare() -> bytes:
        rules = LoadRules(options.rules, StrictHandling.of(strict))
        check_exchange(options, exchange_group)
        with collected_notices() as notices:
            fallback = opened.enter_context(_fallback(open_store(), options))
            prepared.append(PreparedLoad(state, fallback, options, rules, group))
        said = {
            "opened": prepared[0].contents.identity,
            "where": prepared[0].where,
            "timeout_s": float(options.timeout_s),
            "asked": prepared[0].asked if rules.look_for_missing_keys else [],
            "empty": prepared[0].empty,
            "missing": [rules.about_missing_keys, dict(options.rename) if rules.look_for_missing_keys else 0],
            "notices": notices,
            "exchange": options.exchange,
            "cpu_transfer": options.cpu_transfer,
            "has_exchange_group": exchange_group is not None,
            "members": "" if exchange_group is None else subgroup_members(exchange_group),
        }
        return json.dumps(said).encode()

    def connect() -> bytes:
        exchanging.append(replace(exchange_ranks(options, group, exchange_group), holders=holders))
        prepared[0].make_room(exchanging[0])
        return b""

    def read() -> bytes:
        times = prepared[0].read(options, exchanging[0] if exchanging else None)
        if times is None:  # another rank failed, and says so now
            return b""
        loaded.append(prepared[0].finish())
        return json.dumps([times.read, times.exchange, times.copy]).encode()

    answers = [json.loads(a) for a in run_on_all_ranks(group, prepare, doing="preparing the load")]
    where, rules = prepared[0].where, prepared[0].rules
    check_alike(answers, where)
    if group.rank == 0:
        log_notices([answer["notices"] for answer in answers])
    _check_empty(prepared[0], [answer["empty"] for answer in answers], group)
    missing: frozenset[str] = frozenset()
    if rules.look_for_missing_keys:
        asked = {key for answer in answers for key in answer["asked"]}
        with collected_notices() as notices:  # the same on all ranks
            missing = check_missing_keys(asked, prepared[0].contents.arrays, rules, where=where)
        if group.rank == 0:
            log_notices([notices])
    if options.exchange != "direct":
        run_on_all_ranks(group, connect, doing="connecting the ranks that exchange")
    spent = run_on_all_ranks(group, read, doing="reading")
    if not all(spent):
        raise RankFailedError(f"{where}: the exchange of what was read broke off. Load again.")
    times = LoadTimes.over([PhaseTimes(*json.loads(said)) for said in spent])
    if options.exchange != "direct" and group.rank == 0:
        log.info("%s: loaded by %s. %s", where, options.exchange, times)
    recovered = prepared[0].fallback.recovered
    if recovered:
        log.warning(
            "%s is damaged; rank %d has loaded from elsewhere:\n%s",
            where,
            group.rank,
            truncated_list([str(record) for record in recovered]),
        )
    return LoadResult(
        loaded[0], replace(prepared[0].report, missing=missing, recovered=recovered, times=times)
    )


def _check_empty(prepared: PreparedLoad, empty: Sequence[Sequence[str]], group: Group) -> None:
    """Settle what is stored below empty dicts and lists of the request. Collective, all given the same.

    What one rank leaves empty another may ask for: the stages of a pipeline.

    Raises:
        MissingKeyError: see `check_empty_containers`.
    """
    names = {name for of_rank in empty for name in of_rank}
    if not names:
        return

    def ask() -> bytes:
        return json.dumps(prepared.asked_below(names)).encode()

    asked = {
        key for of_rank in run_on_all_ranks(group, ask, doing="comparing keys") for key in json.loads(of_rank)
    }

    def settle() -> bytes:
        with collected_notices() as notices:
            check_empty_containers(prepared.unasked_below(names, asked), prepared.rules, where=prepared.where)
        return json.dumps(notices).encode()

    notices = run_on_all_ranks(group, settle, doing="comparing keys")
    if group.rank == 0:
        log_notices([json.loads(of_rank) for of_rank in notices])


def _fallback(store: Store, options: LoadOptions) -> Fallback:
    opens = partial(open_checkpoint, allow_unsafe_pickle=options.allow_unsafe_pickle)
    return Fallback(store, options.copies, opens, is_allowed=options.on_corrupt == "fallback")
