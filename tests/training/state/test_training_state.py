"""State of a training: resuming from it, its schedules, and random states, which are bit-exact or fresh."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, lr_scheduler

from megackpt import Checkpointer, DeclarationError, MismatchError, load, save
from megackpt.testing.world import SimulatedWorld
from megackpt.training.parallel import ParallelGroups, ParallelLayout, ParallelRng
from megackpt.training.state import (
    TRACKED_AXES,
    CommonObject,
    DataPosition,
    NumpyGenerator,
    ParallelStreams,
    RankObject,
    RankPosition,
    RngState,
    ScheduleState,
    Seeds,
    TorchRng,
    TrackedRng,
    TrainingState,
    loader_object,
)


class Counter:
    """A user's object."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def position_of(rank: int, *, dp: int, tp: int) -> RankPosition:
    return RankPosition(layout={"dp": dp, "tp": tp}, coordinates={"dp": rank // tp, "tp": rank % tp})


def save_of_each(path: Path, declare: Any, *, dp: int, tp: int) -> None:
    def run(group: Any) -> None:
        where = position_of(group.rank, dp=dp, tp=tp)
        save({"o": declare(Counter(where.index("dp")), where).sharded_state_dict("o.")}, path, group=group)

    SimulatedWorld(dp * tp).run(run)


def values_of_each(path: Path, declare: Any, *, dp: int, tp: int) -> list[tuple[Any, str]]:
    def run(group: Any) -> tuple[Any, str]:
        counter = Counter("mine")
        part = declare(counter, position_of(group.rank, dp=dp, tp=tp))
        note = part.resume(load({"o": part.sharded_state_dict("o.")}, path, group=group)["o"], step=1)
        return counter.value, note

    return SimulatedWorld(dp * tp).run(run)


def test_a_data_loader_resumes_at_the_same_dp_whatever_the_other_axes_are(tmp_path: Path) -> None:
    save_of_each(tmp_path / "c", loader_object, dp=2, tp=2)
    for tp in (1, 2, 3):
        values = values_of_each(tmp_path / "c", loader_object, dp=2, tp=tp)
        assert values == [(rank // tp, "") for rank in range(2 * tp)]


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (4, 1), (3, 1)])
def test_a_data_loader_at_another_dp_is_an_error_with_the_reason(tmp_path: Path, dp: int, tp: int) -> None:
    save_of_each(tmp_path / "c", loader_object, dp=2, tp=2)
    expected = rf"States of a Counter were saved at dp 2, and this run is at dp {dp}: a loader's state counts"
    with pytest.raises(MismatchError, match=expected):
        values_of_each(tmp_path / "c", loader_object, dp=dp, tp=tp)


def test_a_state_of_each_rank_is_kept_elsewhere_where_asked_for(tmp_path: Path) -> None:
    def declare(counter: Counter, where: RankPosition) -> RankObject:
        return RankObject(counter, where, elsewhere="keep")

    save_of_each(tmp_path / "c", declare, dp=2, tp=2)
    assert values_of_each(tmp_path / "c", declare, dp=2, tp=2) == [(n // 2, "") for n in range(4)]
    for value, note in values_of_each(tmp_path / "c", declare, dp=4, tp=1):
        assert value == "mine"
        assert "saved at dp 2, tp 2, and this run is at dp 4, tp 1: each rank keeps" in note


def test_states_of_experts_are_stored_once_for_each_and_found_at_another_dense_layout(tmp_path: Path) -> None:
    def part(layout: ParallelLayout, rank: int, counter: Counter) -> RankObject:
        position = RankPosition.of(ParallelGroups.offline(layout, rank))
        return RankObject(counter, position, axes=("ep", "etp"))

    saved = ParallelLayout(tp=4, cp=2, ep=2, etp=2)

    def save_rank(group: Any) -> None:
        expert = saved.expert_coordinates(group.rank)
        counter = Counter([expert.ep, expert.etp])
        save({"o": part(saved, group.rank, counter).sharded_state_dict("o.")}, tmp_path / "c", group=group)

    SimulatedWorld(saved.world_size).run(save_rank)
    layout = ParallelLayout(dp=4, ep=2, etp=2)

    def load_rank(group: Any) -> list[int]:
        counter = Counter()
        resumed = part(layout, group.rank, counter)
        loaded = load({"o": resumed.sharded_state_dict("o.")}, tmp_path / "c", group=group)
        assert resumed.resume(loaded["o"], step=1) == ""
        return list(counter.value)

    assert SimulatedWorld(4).run(load_rank) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_axes_of_dense_layers_and_of_experts_do_not_mix() -> None:
    position = RankPosition.of(ParallelGroups.offline(ParallelLayout(tp=2, ep=2, etp=1), 1))
    assert position.replica_index(["pp", "tp"]) == 0
    assert position.replica_index(["pp", "ep"]) == 0
    with pytest.raises(
        DeclarationError, match=r"ep are axes of experts, and tp of dense layers: .* one kind"
    ):
        position.replica_index(["ep", "tp", "pp"])


def test_parts_are_saved_and_resumed_together_and_report_what_does_not_go_on(tmp_path: Path) -> None:
    def parts(**schedule: float) -> tuple[TrainingState, DataPosition, Counter]:
        data, counter = DataPosition({"files": "v1"}), Counter(0)
        results = {
            "data": data,
            "schedule": ScheduleState(schedule, when_different="checkpoint"),
            "mine": CommonObject(counter),
        }
        return TrainingState(results), data, counter

    state, data, counter = parts(peak=1.0)
    data.take(12)
    counter.value = {"seen": (1, 2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state.sharded_state_dict())
        again, data_then, counter_then = parts(peak=2.0)
        notes = again.resume(checkpointer.load(again.sharded_state_dict()), step=3)
    assert notes == ["the checkpoint's schedule is followed (peak: 1.0 stored, 2.0 given)"]
    assert (data_then.consumed, counter_then.value) == (12, {"seen": (1, 2)})


def test_an_error_of_one_rank_is_raised_on_all_and_names_it() -> None:
    class Picky(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["value"] == 2:
                raise MismatchError("2 is no good")

    def run(group: Any) -> list[str]:
        state = TrainingState({"mine": CommonObject(Picky())}, group=group)
        return state.resume({"mine": {"state": {"value": group.rank}}}, step=1)

    for outcome in SimulatedWorld(4).outcomes(run):
        assert isinstance(outcome, MismatchError)
        assert "Rank 2 failed while resuming the training state: 2 is no good" in str(outcome)


def test_a_part_that_the_checkpoint_lacks_is_named() -> None:
    with pytest.raises(MismatchError, match=r"The checkpoint has no 'data', which is a part of this run"):
        TrainingState({"data": DataPosition({})}).resume({"schedule": {}}, step=1)


def test_names_that_cannot_begin_keys_are_errors() -> None:
    with pytest.raises(DeclarationError, match=r"named \['a\.b', ''\]"):
        TrainingState({"a.b": DataPosition({}), "": DataPosition({}), "c": DataPosition({})})


def test_a_position_in_another_order_of_samples_is_an_error_that_names_the_fields() -> None:
    stored = DataPosition({"samples": 10, "seed": 1}).sharded_state_dict()
    with pytest.raises(MismatchError, match=r"(?s)samples: 10 stored, 12 here\n  seed: 1 stored, None here"):
        DataPosition({"samples": 12}).resume(stored, step=1)
    with pytest.raises(DeclarationError, match="batch of 0 samples"):
        DataPosition({}).take(0)


GIVEN = {"peak": 1e-3, "minimum": 1e-4, "warmup": 10, "num_steps": 0}
STORED = {"peak": 3e-3, "minimum": 1e-4, "warmup": 20, "num_steps": 50}


def resumed(stored: Any, schedule: Any, path: Path, **options: Any) -> tuple[ScheduleState, str]:
    save({"schedule": ScheduleState(stored).sharded_state_dict()}, path)
    state = ScheduleState(schedule, **options)
    return state, state.resume(load({"schedule": state.sharded_state_dict()}, path)["schedule"], step=50)


def test_a_difference_is_an_error_that_names_each_field_with_both_values(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as raised:
        resumed(STORED, GIVEN, tmp_path / "c")
    assert "  peak: 0.003 stored, 0.001 given\n  warmup: 20 stored, 10 given\n" in str(raised.value)
    assert "num_steps" not in str(raised.value)
    assert "minimum" not in str(raised.value)


def test_the_checkpoint_s_schedule_wins_where_asked_for(tmp_path: Path) -> None:
    state, note = resumed(STORED, GIVEN, tmp_path / "c", when_different="checkpoint")
    assert state.values == STORED
    assert note == (
        "the checkpoint's schedule is followed (peak: 0.003 stored, 0.001 given; warmup: 20 stored, 10 given)"
    )


def test_the_given_schedule_wins_where_asked_for_with_the_progress_that_is_stored(tmp_path: Path) -> None:
    state, note = resumed(STORED, GIVEN, tmp_path / "c", when_different="given")
    assert state.values == {**GIVEN, "num_steps": 50}
    assert note.startswith("the given schedule is followed (peak:")


def test_equal_schedules_continue_without_a_note(tmp_path: Path) -> None:
    state, note = resumed({**GIVEN, "num_steps": 50}, GIVEN, tmp_path / "c")
    assert (state.values["num_steps"], note) == (50, "")


def test_a_field_that_only_one_side_has_is_a_difference(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"decay: nothing stored, 2 given"):
        resumed(STORED, {**STORED, "decay": 2}, tmp_path / "c")


Make = Callable[[SGD], Any]
SCHEDULES: dict[str, Make] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=30),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, milestones=[3, 6]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.ExponentialLR(o, gamma=0.9)], milestones=[5]
    ),
}


def rates(optimizer: SGD, schedule: Any, steps: int) -> list[float]:
    results = []
    for _ in range(steps):
        optimizer.step()
        schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        results.append(optimizer.param_groups[0]["lr"])
    return results


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_s_schedules_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    optimizer = SGD([torch.ones(1)], lr=0.5)
    schedule = SCHEDULES[name](optimizer)
    rates(optimizer, schedule, 7)
    state = {"s": ScheduleState(schedule).sharded_state_dict(), "optimizer": optimizer.state_dict()}
    save(state, tmp_path / "c")
    expected = rates(optimizer, schedule, 12)

    fresh = SGD([torch.ones(1)], lr=0.5)
    again = SCHEDULES[name](fresh)
    resumed = ScheduleState(again)
    loaded = load({"s": resumed.sharded_state_dict()}, tmp_path / "c")
    fresh.load_state_dict(loaded["optimizer"])
    assert resumed.resume(loaded["s"], step=7) == ""
    assert rates(fresh, again, 12) == expected


def test_a_field_deep_in_a_chained_schedule_is_named_and_overridden(tmp_path: Path) -> None:
    def chained(gamma: float) -> Any:
        optimizer = SGD([torch.ones(1)], lr=0.5)
        parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, gamma=gamma)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])

    with pytest.raises(MismatchError, match=r"_schedulers\.1\.gamma: 0\.9 stored, 0\.8 given"):
        resumed(chained(0.9), chained(0.8), tmp_path / "c")
    state, _ = resumed(chained(0.9), chained(0.8), tmp_path / "c", when_different="given")
    assert state.values["_schedulers"][1]["gamma"] == 0.8


def test_megatron_s_schedule_goes_on_and_is_compared(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.optimizer_param_scheduler")

    def scheduler(**changes: float) -> Any:
        asked: dict[str, Any] = {
            **{"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 4, "lr_decay_steps": 20},
            **{"lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 20},
            **{"wd_incr_style": "constant"},
        }
        return module.OptimizerParamScheduler(SGD([torch.ones(1)], lr=0.5), **{**asked, **changes})

    trained = scheduler()
    trained.step(increment=7)
    path = tmp_path / "c"
    save({"schedule": ScheduleState(trained).sharded_state_dict()}, path)
    results = {}
    for when, changes in [("error", {}), ("checkpoint", {"max_lr": 1.0}), ("given", {"max_lr": 1.0})]:
        again = scheduler(**changes)
        state = ScheduleState(again, when_different=when)  # type: ignore[arg-type]
        state.resume(load({"schedule": state.sharded_state_dict()}, path)["schedule"], step=7)
        assert again.num_steps == 7
        results[when] = again.optimizer.param_groups[0]["lr"]
    assert results["error"] == results["checkpoint"] == trained.optimizer.param_groups[0]["lr"]
    assert results["given"] > 0.5
    different = ScheduleState(scheduler(max_lr=1.0))
    loaded = load({"schedule": different.sharded_state_dict()}, path)["schedule"]
    with pytest.raises(MismatchError, match=r"max_lr: 0\.001 stored, 1\.0 given"):
        different.resume(loaded, step=7)


def test_an_unknown_policy_of_schedules_is_an_error() -> None:
    with pytest.raises(DeclarationError, match="Give 'error', 'checkpoint' or 'given'"):
        ScheduleState({}, when_different="stored")  # type: ignore[arg-type]


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
