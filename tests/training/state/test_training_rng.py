"""Random states are bit-exact at the layout of the save, and at another an error or fresh as asked for."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import DeclarationError, MismatchError, load, save
from megackpt.parallel import ParallelGroups, ParallelLayout, ParallelRng
from megackpt.testing.world import SimulatedWorld
from megackpt.training_state import (
    TRACKED_AXES,
    NumpyGenerator,
    ParallelStreams,
    RankPosition,
    RngState,
    Seeds,
    TorchRng,
    TrackedRng,
)

LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)
OTHERS = [
    ParallelLayout(tp=2, dp=4),
    ParallelLayout(tp=4, pp=2),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=2, pp=2, cp=2),
    ParallelLayout(tp=2, pp=2, dp=2, ep=2),  # the same ranks of dense layers, with other experts
    ParallelLayout(tp=2, pp=2, dp=2, etp=1),
]


@pytest.fixture
def _own_generators() -> Iterator[None]:
    """Give the process's generators back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def tracker_of(*names: str) -> Any:
    """Return Megatron's own tracker, whose states are those of CPU generators where there is no GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = module.CudaRNGStatesTracker()
    states = {name: torch.Generator().manual_seed(n).get_state() for n, name in enumerate(names)}
    tracker.set_states(states)
    return tracker


def draws_of_process(generator: np.random.Generator, tracker: Any) -> list[Any]:
    tracked = torch.Generator()
    tracked.set_state(tracker.get_states()["model-parallel-rng"])
    return [
        [random.gauss(0, 1), random.random()],
        np.random.normal(size=3).tolist(),
        torch.rand(3).tolist(),
        generator.random(3).tolist(),
        torch.rand(3, generator=tracked).tolist(),
    ]


@pytest.mark.usefixtures("_own_generators")
def test_all_generators_of_a_process_go_on_bit_for_bit(tmp_path: Path) -> None:
    generator, tracker = np.random.default_rng(3), tracker_of("model-parallel-rng")
    rng = RngState.of_process(
        RankPosition.single_process(), seed=1, tracker=tracker, generators={"augment": generator}
    )
    random.seed(5)
    random.gauss(0, 1)  # the spare normal number is part of the state
    np.random.normal()
    save(rng.sharded_state_dict(), tmp_path / "c")
    expected = draws_of_process(generator, tracker)

    others, tracker_then = np.random.default_rng(9), tracker_of("model-parallel-rng")
    random.seed(6)
    torch.manual_seed(6)
    resumed = RngState.of_process(
        RankPosition.single_process(), seed=2, tracker=tracker_then, generators={"augment": others}
    )
    assert resumed.resume(load(resumed.sharded_state_dict(), tmp_path / "c"), step=10) == ""
    assert draws_of_process(others, tracker_then) == expected


def states_of(layout: ParallelLayout, rank: int, **options: Any) -> tuple[RngState, list[torch.Generator]]:
    """Return the random states of a rank, and the generators that they are of."""
    groups = ParallelGroups.offline(layout, rank)
    rng = ParallelRng(1, groups)
    own = torch.Generator().manual_seed(rank)
    sources = {"parallel": ParallelStreams(rng), "own": TorchRng(own, "own")}
    state = RngState(RankPosition.of(groups), seed=1, sources=sources, **options)
    return state, [rng.replicated, rng.distinct, own, rng.expert]


def drawn(generators: list[torch.Generator]) -> tuple[float, ...]:
    return tuple(torch.rand(1, generator=generator).item() for generator in generators)


def saved_at(layout: ParallelLayout, path: Path, *, used: int = 1) -> list[tuple[float, ...]]:
    """Save after some draws; return what each rank draws next."""

    def run(group: Any) -> tuple[float, ...]:
        rng, generators = states_of(layout, group.rank)
        for _ in range(used):
            drawn(generators)
        save({"rng": rng.sharded_state_dict("rng.")}, path, group=group)
        return drawn(generators)

    return SimulatedWorld(layout.world_size).run(run)


def resumed_at(layout: ParallelLayout, path: Path, **options: Any) -> list[tuple[str, tuple[float, ...]]]:
    """Resume step 7; return what each rank says and draws."""

    def run(group: Any) -> tuple[str, tuple[float, ...]]:
        rng, generators = states_of(layout, group.rank, **options)
        loaded = load({"rng": rng.sharded_state_dict("rng.")}, path, group=group)
        return rng.resume(loaded["rng"], step=7), drawn(generators)

    return SimulatedWorld(layout.world_size).run(run)


@pytest.mark.parametrize("layout", [LAYOUT, ParallelLayout(tp=2, cp=2, dp=2, ep=4, etp=1)], ids=str)
@pytest.mark.parametrize("elsewhere", ["error", "reseed"])
def test_at_the_same_layout_each_rank_gets_its_own_state(
    tmp_path: Path, elsewhere: str, layout: ParallelLayout
) -> None:
    expected = saved_at(layout, tmp_path / "c")
    assert [drawn for _, drawn in resumed_at(layout, tmp_path / "c", elsewhere=elsewhere)] == expected


def test_states_from_before_there_were_experts_resume_at_the_same_layout(tmp_path: Path) -> None:
    def state(layout: ParallelLayout, generator: torch.Generator, *, before: bool) -> RngState:
        position = RankPosition.of(ParallelGroups.offline(layout, 0))
        if before:
            position = RankPosition(layout=position.layout, coordinates=position.coordinates)
        return RngState(position, seed=1, sources={"own": TorchRng(generator, "own")})

    layout, generator = ParallelLayout(), torch.Generator().manual_seed(6)
    save(state(layout, generator, before=True).sharded_state_dict(), tmp_path / "c")
    resumed = torch.Generator()
    now = state(layout, resumed, before=False)
    assert now.resume(load(now.sharded_state_dict(), tmp_path / "c"), step=1) == ""
    assert torch.equal(torch.rand(3, generator=resumed), torch.rand(3, generator=generator))


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_at_another_layout_streams_are_an_error_unless_fresh_ones_are_asked_for(
    tmp_path: Path, layout: ParallelLayout
) -> None:
    saved_at(LAYOUT, tmp_path / "c")
    with pytest.raises(MismatchError, match=r"saved at cp 1, dp 2, pp 2, tp 2, and this run is at .*reseed"):
        resumed_at(layout, tmp_path / "c")


def test_fresh_streams_depend_on_seed_step_and_coordinates_and_nothing_else(tmp_path: Path) -> None:
    saved = saved_at(LAYOUT, tmp_path / "a")
    saved_at(ParallelLayout(tp=4), tmp_path / "b", used=5)
    layout = OTHERS[0]
    once, again = (resumed_at(layout, tmp_path / name, elsewhere="reseed") for name in ("a", "b"))
    assert [draws for _, draws in once] == [draws for _, draws in again]
    assert all("fresh: they were saved at cp 1, dp 2, pp 2, tp 2" in note for note, _ in once)
    assert not {draw for draws in saved for draw in draws} & {draw for _, draws in once for draw in draws}
    own = [draws[2] for _, draws in once]  # differs along pp and dp, and is equal over tp
    assert own[0::2] == own[1::2]
    assert len(set(own)) == layout.dp


def test_equal_shapes_of_other_axes_are_another_layout(tmp_path: Path) -> None:
    def state(axis: str) -> RngState:
        location = RankPosition(layout={"tp": 1, axis: 1}, coordinates={"tp": 0, axis: 0})
        return RngState(location, seed=1, sources={"own": TorchRng(torch.Generator(), "own")})

    save(state("cp").sharded_state_dict(), tmp_path / "c")
    with pytest.raises(MismatchError, match=r"saved at cp 1, tp 1, and this run is at dp 1, tp 1"):
        state("dp").resume(load(state("dp").sharded_state_dict(), tmp_path / "c"), step=1)


def test_other_sources_are_an_error_that_names_them(tmp_path: Path) -> None:
    saved_at(ParallelLayout(), tmp_path / "c")
    rng = RngState(RankPosition.of(ParallelGroups.offline(ParallelLayout(), 0)), seed=1, sources={})
    with pytest.raises(MismatchError, match=r"saved from own, parallel, and this run has"):
        rng.resume(load({"rng": rng.sharded_state_dict("rng.")}, tmp_path / "c")["rng"], step=1)


def test_a_tracker_s_states_begin_anew_along_the_axes_that_megatron_gives_them() -> None:
    def reseeded(coordinates: dict[str, int]) -> dict[str, bytes]:
        tracker = tracker_of(*TRACKED_AXES)
        location = RankPosition(layout={"tp": 2, "pp": 2, "dp": 2, "ep": 2}, coordinates=coordinates)
        TrackedRng(tracker).reseed(Seeds(base=1, step=3, position=location))
        return {name: state.numpy().tobytes() for name, state in tracker.get_states().items()}

    origin = {"tp": 0, "pp": 0, "dp": 0, "ep": 0}
    before = reseeded(origin)
    changed = {
        axis: {name for name, state in reseeded({**origin, axis: 1}).items() if state != before[name]}
        for axis in origin
    }
    assert changed == {
        "tp": {"model-parallel-rng", "expert-parallel-rng"},
        "pp": set(TRACKED_AXES),
        "dp": set(),
        "ep": {"expert-parallel-rng"},
    }
    with pytest.raises(DeclarationError, match=r"random state 'mine', and it is not known along which axes"):
        TrackedRng(tracker_of("mine")).reseed(Seeds(base=1, step=3, position=RankPosition.single_process()))


@pytest.mark.parametrize(
    "layout", [ParallelLayout(tp=4, cp=2, ep=2, etp=1), ParallelLayout(tp=2, dp=4, ep=2, etp=4)], ids=str
)
def test_a_tracker_s_state_of_experts_is_equal_on_the_replicas_of_an_expert(layout: ParallelLayout) -> None:
    ranks: dict[bytes, set[int]] = {}
    for rank in range(layout.world_size):
        tracker = tracker_of("expert-parallel-rng")
        position = RankPosition.of(ParallelGroups.offline(layout, rank))
        TrackedRng(tracker).reseed(Seeds(base=1, step=3, position=position))
        ranks.setdefault(tracker.get_states()["expert-parallel-rng"].numpy().tobytes(), set()).add(rank)
    assert list(ranks.values()) == [set(replicas) for replicas in layout.all_ranks_of("edp")]


def test_a_tracker_s_generators_stay_the_same_objects() -> None:
    class Tracker:
        def __init__(self) -> None:
            self.states: dict[str, Any] = {"model-parallel-rng": torch.Generator().manual_seed(4)}

        def get_states(self) -> dict[str, Any]:
            return dict(self.states)

        def set_states(self, states: dict[str, Any]) -> None:
            self.states = states

    tracker = Tracker()
    owned = tracker.states["model-parallel-rng"]
    source = TrackedRng(tracker)
    state = source.capture()
    expected = torch.rand(3, generator=owned)
    source.restore(state)
    assert tracker.states["model-parallel-rng"] is owned
    assert torch.equal(torch.rand(3, generator=owned), expected)
    source.reseed(Seeds(base=1, step=3, position=RankPosition.single_process()))
    assert tracker.states["model-parallel-rng"] is owned


def test_generators_of_another_kind_or_name_are_errors() -> None:
    state = NumpyGenerator(np.random.Generator(np.random.MT19937(1)), "augment").capture()
    with pytest.raises(MismatchError, match=r"'augment' was saved from a MT19937.*here is a PCG64"):
        NumpyGenerator(np.random.default_rng(1), "augment").restore(state)
    with pytest.raises(MismatchError, match=r"'mine' has 16 bytes, which does not fit .*on cpu"):
        TorchRng(torch.Generator(), "mine").restore(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(MismatchError, match=r"saved as model-parallel-rng, and here they are other"):
        TrackedRng(tracker_of("other")).restore(TrackedRng(tracker_of("model-parallel-rng")).capture())


@pytest.mark.parametrize("elsewhere", ["keep", ""])
def test_an_unknown_policy_is_an_error(elsewhere: Any) -> None:
    with pytest.raises(DeclarationError, match="Give 'error' or 'reseed'"):
        RngState(RankPosition.single_process(), seed=1, sources={}, elsewhere=elsewhere)


@pytest.mark.parametrize("coordinates", [{"dp": 2}, {"tp": 0}, {"dp": -1}])
def test_a_position_outside_of_its_layout_is_an_error(coordinates: dict[str, int]) -> None:
    with pytest.raises(DeclarationError, match="RankPosition has"):
        RankPosition(layout={"dp": 2}, coordinates=coordinates)
