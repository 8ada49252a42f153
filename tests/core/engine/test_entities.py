"""The law on entities: for any world that saves and any that loads, load(save(x)) equals x, bit for bit."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.comm import Group
from megackpt.mapping import StateDict
from megackpt.storage import MemoryStore
from megackpt.testing.state_dicts import (
    GlobalState,
    blank,
    global_states,
    placements,
    state_difference,
    values_of,
)
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few


@settings(max_examples=few(62, of=500), deadline=None, suppress_health_check=list(HealthCheck))
@given(state=global_states(), source_ranks=st.integers(1, 3), target_ranks=st.integers(1, 3), data=st.data())
def test_any_world_loads_what_any_other_saved_of_all_entities(
    state: GlobalState, source_ranks: int, target_ranks: int, data: st.DataObject
) -> None:
    source = data.draw(placements(state, ranks=source_ranks), label="source")
    target = data.draw(placements(state, ranks=target_ranks), label="target")
    store = MemoryStore()

    def save_rank(group: Group) -> None:
        save(source.declare(group.rank), store, group=group)

    def load_rank(group: Group) -> StateDict:
        return load(blank(target.declare(group.rank)), store, group=group)

    SimulatedWorld(source_ranks).run(save_rank)
    for rank, loaded in enumerate(SimulatedWorld(target_ranks).run(load_rank)):
        assert state_difference(loaded, values_of(target.declare(rank))) is None
