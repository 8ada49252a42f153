"""Pipelines: plans, which running all stages in one process checks, and tables of stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy, booleans, composite, integers, lists

from megackpt import DeclarationError
from megackpt.training.parallel import (
    ParallelGroups,
    ParallelLayout,
    StageTable,
    forward_backward,
)
from megackpt.training.parallel.schedule import (
    Action,
    Backward,
    Forward,
    Transfer,
    plan_1f1b,
    plan_forward,
    plan_interleaved,
)
from tests.support.effort import few


def test_neighbours_that_both_send_post_send_and_receive_together() -> None:
    # First of two stages: activation 1 goes out while the gradient of 0 comes in.
    first = Transfer(send_activation=Forward(1), receive_gradient=Backward(0))
    second = Transfer(send_gradient=Backward(0), receive_activation=Forward(1))
    assert first in plan_1f1b(2, 0, 3)
    assert second in plan_1f1b(2, 1, 3)


UNTIMED = settings(max_examples=few(40, of=100), deadline=None)  # a busy machine is no error
stages_ = integers(1, 6)
micro_batches_ = integers(0, 12)
chunks_ = integers(1, 4)
rounds_ = integers(0, 4)

Plans = list[tuple[Action, ...]]
ENDS = ("send_activation", "send_gradient", "receive_activation", "receive_gradient")


class Network:
    """Runs the plans of all stages in one process, and keeps the order in which actions ended.

    The strictest possible network: nothing is buffered, so that a message moves only while its sender and its
    receiver both wait for it, and a stage goes on when all messages of its transfer have moved. Between two
    ranks messages have no name: the first that is sent meets the first that is received. Actions that need
    what has not arrived are errors.
    """

    def __init__(self, plans: Plans, chunks: int = 1) -> None:
        self.plans = plans
        self.chunks = chunks
        self.position = [0] * len(plans)
        self.waiting = [self._open(stage) for stage in range(len(plans))]
        self.have: list[set[tuple[str, Action]]] = [set() for _ in plans]
        self.done: list[tuple[int, Action]] = []

    def run(self) -> list[tuple[int, Action]]:
        stages = range(len(self.plans))
        progress = True
        while progress:
            progress = False
            for stage in stages:
                while self.position[stage] < len(self.plans[stage]) and not self.waiting[stage]:
                    self._perform(stage, self.plans[stage][self.position[stage]])
                    self.position[stage] += 1
                    self.waiting[stage] = self._open(stage)
                    progress = True
            for stage in stages:
                progress |= self._move(stage, "activation") or self._move(stage, "gradient")
        assert self.position == [len(plan) for plan in self.plans], f"deadlock at {self.position}"
        return self.done

    def _open(self, stage: int) -> list[str]:
        """Return what the current action of a stage, if it is a transfer, waits for; in order of posting."""
        action = self._current(stage)
        return [end for end in ENDS if isinstance(action, Transfer) and getattr(action, end) is not None]

    def _current(self, stage: int) -> Action | None:
        at = self.position[stage]
        return self.plans[stage][at] if at < len(self.plans[stage]) else None

    def _peer(self, stage: int, end: str) -> int:
        forwards = end in ("send_activation", "receive_gradient")
        return (stage + (1 if forwards else -1)) % len(self.plans)

    def _move(self, source: int, what: str) -> bool:
        """Let a message of a stage pass if its receiver waits for one of this stage."""
        if f"send_{what}" not in self.waiting[source]:
            return False
        target = self._peer(source, f"send_{what}")
        to = [e for e in self.waiting[source] if e.startswith("send") and self._peer(source, e) == target]
        back = [
            e for e in self.waiting[target] if e.startswith("receive") and self._peer(target, e) == source
        ]
        if not back or to[0] != f"send_{what}":
            return False
        assert back[0] == f"receive_{what}", "two stages disagree about what is sent first"
        sent = getattr(self._current(source), to[0])
        received = getattr(self._current(target), back[0])
        assert self._position(source, sent) + (1 if what == "activation" else -1) == self._position(
            target, received
        ), "a message from a chunk that is not the neighbour's"
        assert sent.micro_batch == received.micro_batch, "two stages disagree about the micro-batch"
        assert ("result", sent) in self.have[source], "sent before it was computed"
        self.waiting[source].remove(to[0])
        self.waiting[target].remove(back[0])
        self.have[target].add(("input", received))
        return True

    def _position(self, stage: int, action: Forward | Backward) -> int:
        return action.chunk * len(self.plans) + stage

    def _perform(self, stage: int, action: Action) -> None:
        self.done.append((stage, action))
        if isinstance(action, Transfer):
            return
        last = len(self.plans) * self.chunks - 1
        end = 0 if isinstance(action, Forward) else last
        assert self._position(stage, action) == end or ("input", action) in self.have[stage]
        if isinstance(action, Backward):
            forward = Forward(action.micro_batch, action.chunk)
            assert ("result", forward) in self.have[stage], "backward before forward"
        self.have[stage].add(("result", action))


def most_in_flight(plan: tuple[Action, ...]) -> int:
    in_flight = most = 0
    for action in plan:
        in_flight += isinstance(action, Forward) - isinstance(action, Backward)
        most = max(most, in_flight)
    return most


def interleaved(stages: int, chunks: int, micro_batches: int) -> Plans:
    return [plan_interleaved(stages, stage, chunks, micro_batches) for stage in range(stages)]


@UNTIMED
@given(stages=stages_, micro_batches=micro_batches_)
def test_1f1b_ends_without_deadlock_even_if_nothing_is_buffered(stages: int, micro_batches: int) -> None:
    Network([plan_1f1b(stages, stage, micro_batches) for stage in range(stages)]).run()


@UNTIMED
@given(stages=stages_, chunks=chunks_, micro_batches=micro_batches_)
def test_forward_plan_ends_without_deadlock(stages: int, chunks: int, micro_batches: int) -> None:
    if chunks > 1:
        micro_batches *= stages
    plans = [plan_forward(stages, stage, micro_batches, chunks=chunks) for stage in range(stages)]
    done = Network(plans, chunks).run()
    assert not any(isinstance(action, Backward) for _, action in done)
    assert sum(isinstance(action, Forward) for _, action in done) == stages * chunks * micro_batches


@UNTIMED
@given(stages=stages_, micro_batches=micro_batches_)
def test_each_stage_runs_every_micro_batch_once_each_way_in_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        plan = plan_1f1b(stages, stage, micro_batches)
        assert [a.micro_batch for a in plan if isinstance(a, Forward)] == list(range(micro_batches))
        assert [a.micro_batch for a in plan if isinstance(a, Backward)] == list(range(micro_batches))


@UNTIMED
@given(stages=stages_, micro_batches=micro_batches_)
def test_micro_batches_in_flight_are_bounded_by_the_stages_to_come(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        most = most_in_flight(plan_1f1b(stages, stage, micro_batches))
        assert most == min(stages - stage, micro_batches)


@UNTIMED
@given(stages=stages_, chunks=chunks_, rounds=rounds_)
def test_interleaving_ends_without_deadlock_and_every_message_has_its_receiver(
    stages: int, chunks: int, rounds: int
) -> None:
    plans = interleaved(stages, chunks, rounds * stages)
    done = Network(plans, chunks).run()
    messages: Counter[str] = Counter()
    for _, action in done:
        if isinstance(action, Transfer):
            messages.update(end for end in ENDS if getattr(action, end) is not None)
    hops = (stages * chunks - 1) * rounds * stages
    assert all(messages[end] == hops for end in ENDS)


@UNTIMED
@given(stages=stages_, chunks=chunks_, rounds=rounds_)
def test_interleaved_chunks_take_turns_of_as_many_micro_batches_as_stages(
    stages: int, chunks: int, rounds: int
) -> None:
    turns = [
        (cycle * stages + index, chunk)
        for cycle in range(rounds)
        for chunk in range(chunks)
        for index in range(stages)
    ]
    for plan in interleaved(stages, chunks, rounds * stages):
        assert [(a.micro_batch, a.chunk) for a in plan if isinstance(a, Forward)] == turns
        backwards = [(a.micro_batch, chunks - 1 - a.chunk) for a in plan if isinstance(a, Backward)]
        assert backwards == turns


@UNTIMED
@given(stages=stages_, chunks=chunks_, rounds=rounds_)
def test_interleaved_forwards_in_flight_are_bounded(stages: int, chunks: int, rounds: int) -> None:
    for stage, plan in enumerate(interleaved(stages, chunks, rounds * stages)):
        bound = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        assert most_in_flight(plan) == min(bound, rounds * stages * chunks)


@UNTIMED
@given(stages=integers(2, 6), chunks=integers(2, 4), micro_batches=micro_batches_)
def test_micro_batches_that_are_no_multiple_of_the_stages_are_rejected(
    stages: int, chunks: int, micro_batches: int
) -> None:
    if micro_batches % stages == 0:
        return
    for plan in (
        lambda: plan_interleaved(stages, 0, chunks, micro_batches),
        lambda: plan_forward(stages, 0, micro_batches, chunks=chunks),
    ):
        with pytest.raises(DeclarationError, match=rf"{micro_batches} micro-batches.*multiple of {stages}"):
            plan()


def test_an_even_table_of_two_virtual_stages_is_megatrons() -> None:
    # Megatron: the first layer of a chunk is vp_stage * (L / vpp) + pp_rank * (L / pp / vpp).
    table = StageTable.even(16, pp=4, vpp=2)
    for stage in range(4):
        for virtual_stage in range(2):
            first = virtual_stage * 8 + stage * 2
            assert table.layers_of(stage, virtual_stage) == (first, first + 1)


def test_embedding_and_loss_may_count_as_layers() -> None:
    table = StageTable.even(6, pp=2, vpp=2, account_for_embedding=True, account_for_loss=True)
    assert str(table) == "Et|(tt|)*2tL"
    assert StageTable.even(3, pp=4, account_for_embedding=True).layers[0] == ()


def test_counts_are_taken_as_given() -> None:
    assert StageTable.from_counts((1, 4, 0), pp=3).layers == ((0,), (1, 2, 3, 4), ())


def test_a_layout_string_of_megatrons_documentation() -> None:
    table = StageTable.from_string("Ettt|(tt|)*29,m|L", pp=16)
    assert (table.num_layers, table.vpp) == (61, 2)
    assert table.layers_of(0, 0) == (0, 1, 2)
    assert table.layers_of(1, 0) == (3, 4)
    assert table.layers_of(13, 1) == (59, 60)
    assert (table.mtp_layers_of(14, 1), table.mtp_layers_of(13, 1)) == ((0,), ())
    assert [table.has_embedding(0, v) for v in (0, 1)] == [True, False]
    assert [table.has_loss(15, v) for v in (0, 1)] == [False, True]
    assert table.stage_of(59) == (13, 1)
    assert str(table) == "Ettt|(tt|)*29m|L"


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("E,t*3|t|L", ["Ettt", "t", "L"]),
        ("Et(tt|t)*2|L", ["Ettt", "ttt", "t", "L"]),  # parentheses may reach over the end of a stage
        ("E|*2t|L", ["E", "", "t", "L"]),
        ("E((t|)*2t|)*2L", ["Et", "t", "t", "t", "t", "t", "L"]),
        ("Et*0|tL", ["E", "tL"]),
    ],
)
def test_repetitions_are_expanded(text: str, stages: list[str]) -> None:
    table = StageTable.from_string(text, pp=len(stages))
    assert [len(layers) for layers in table.layers] == [stage.count("t") for stage in stages]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("Ett|x|ttL", r"'Ett\|x\|ttL' has at position 4 'x'.*Use E \(embedding\)"),
        ("E,t|( tL", r"position 5 ' '"),
        ("Ett|(tt|*2|L", r"position 4 a \( without its \)"),
        ("Ett|tt)*2|L", r"position 6 a \) without its \("),
        ("E(tt|)L", r"position 1 parentheses without a number"),
        ("Et*|L", r"position 2 a \* without a number"),
        ("*3tL", r"position 0 '\*'"),
        ("E(t|)*999999999999L", r"more than 65536 letters"),
        ("(" * 1000 + "tL", r"position 20 the 21th \( that is open. Nest at most 20"),
        ("tt|tL", r"0 times the embedding \(E\).*there once, as the first letter"),
        ("tE|tL", r"there once, as the first letter"),
        ("Et|tLt", r"there once, as the last letter"),
        ("Et|EtL", r"2 times the embedding"),
        ("", r"0 times the embedding"),
        ("Et|t|tL", r"3 stages does not fit pp=2.*multiple of pp"),
        ("Em|tm|L|", r"last letter|MTP layers \(m\) on stages \[0, 1\]"),
        ("Et|m|t|L", r"1 MTP layers at position 1.*last virtual stage"),
        ("Et|t|m|tL", r"layer 2 comes after the MTP layers, which are on stage 0, virtual stage 1"),
    ],
)
def test_a_layout_string_that_is_wrong_is_rejected(text: str, error: str) -> None:
    with pytest.raises(DeclarationError, match=error):
        StageTable.from_string(text, pp=2)


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        (((0, 1), (3,)), r"layer 2 is on no stage"),
        (((0, 1), (1, 2, 3)), r"layer 1 is on stage 0 and stage 1\n"),
        (((0, 1), (2, 3, 3)), r"layer 3 is on stage 1 and stage 1\n"),
        (((0, 1, 2), (3, 4)), r"layer 4 is on stage 1, but the model has no such layer"),
        (((-1, 0, 1), (2, 3)), r"layer -1 is on stage 0, but the model has no such layer"),
        (((0, 3), (1, 2)), r"layer 3 \(stage 0\) comes before layer 1 \(stage 1\)"),
        (((0, 2), (1, 3)), r"layer 2 \(stage 0\) comes before layer 1 \(stage 1\)"),
        (((0,), (1,), (1,), (3,)), r"layer 1 is on stage 1, virtual stage 0 and stage 0, virtual stage 1"),
        (((0, 1, 2, 3), (), ()), r"3 stages does not fit pp=2"),
        ((), r"0 stages does not fit pp=2"),
    ],
)
def test_a_layer_on_no_stage_or_on_two_is_named(layers: tuple[tuple[int, ...], ...], error: str) -> None:
    with pytest.raises(DeclarationError, match=error):
        StageTable(num_layers=4, pp=2, layers=layers)


EVEN = StageTable.even(4, pp=2)
ALONE = ParallelGroups.create(ParallelLayout())


def no_model(*_: Any) -> Any:
    raise AssertionError("it is not called")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: StageTable.from_string("Et|tL", pp=1), r"2 stages with pp=1.*Give one stage, or set pp"),
        (lambda: StageTable.even(2, pp=3), r"2 layers.*pp=3.*at most 2 stages"),
        (lambda: StageTable.from_counts((-1, 3, 3), pp=3), r"\(-1, 3, 3\)"),
        (lambda: EVEN.check_num_layers(5), r"'Ett\|ttL' has 4 layers, but the model has 5"),
        (
            lambda: EVEN.check_layout(pp=2, vpp=2),
            r"one for pp=2 stages, but the layout has pp=2, vpp=2 stages",
        ),
        (lambda: EVEN.layers_of(1, 1), r"no stage 1 with virtual stage 1"),
        (lambda: EVEN.stage_of(4), r"no layer 4 in a model of 4"),
        (lambda: plan_1f1b(2, 2, 1), r"stage 2 of 2.*stage of 0\.\.1"),
        (lambda: plan_interleaved(2, 0, 0, 2), r"0 model chunks.*at least one"),
        (lambda: forward_backward(no_model, [], ALONE), r"no micro-batch.*at least one"),
    ],
)
def test_stages_and_micro_batches_that_there_are_not_are_an_error(
    ask: Callable[[], object], message: str
) -> None:
    EVEN.check_num_layers(4)
    EVEN.check_layout(pp=2, vpp=1)
    with pytest.raises(DeclarationError, match=message):
        ask()


@pytest.mark.parametrize("value", [None, {}, {"layout": "EtL"}, {"layout": "EtL", "pp": "x"}])
def test_json_that_is_no_table_is_rejected(value: Any) -> None:
    with pytest.raises(DeclarationError, match=r"does not describe a stage table.*to_json"):
        StageTable.from_json(value)


ANY_TABLE = settings(deadline=None)  # a busy machine is no error


@composite
def tables(draw: SearchStrategy) -> StageTable:
    """Draw any table with up to 5 stages, 3 virtual stages and 6 layers a chunk, some with MTP layers."""
    pp = draw(integers(1, 5))
    vpp = draw(integers(1, 3)) if pp > 1 else 1
    # Small numbers repeat, so that strings with repetitions are drawn.
    counts = draw(lists(integers(0, 6), min_size=pp * vpp, max_size=pp * vpp))
    table = StageTable.from_counts(counts, pp=pp)
    if not draw(booleans()):
        return table
    last_layer = max((position for position, count in enumerate(counts) if count), default=0)
    first = max(last_layer, pp * (vpp - 1))
    return StageTable(
        num_layers=table.num_layers,
        pp=pp,
        layers=table.layers,
        mtp_layers=draw(integers(1, 6)),
        mtp_position=draw(integers(first, pp * vpp - 1)),
    )


@ANY_TABLE
@given(table=tables())
def test_a_table_is_read_back_from_its_string_and_its_json(table: StageTable) -> None:
    assert StageTable.from_string(str(table), pp=table.pp) == table
    assert StageTable.from_json(table.to_json()) == table


@ANY_TABLE
@given(table=tables())
def test_chunks_in_the_order_of_the_forward_pass_have_all_layers(table: StageTable) -> None:
    visited = [
        layer for v in range(table.vpp) for stage in range(table.pp) for layer in table.layers_of(stage, v)
    ]
    assert visited == list(range(table.num_layers))
    for layer in visited:
        assert layer in table.layers_of(*table.stage_of(layer))


@ANY_TABLE
@given(layers=integers(1, 40), pp=integers(1, 8), vpp=integers(1, 3))
def test_an_even_table_is_even(layers: int, pp: int, vpp: int) -> None:
    vpp = vpp if pp > 1 else 1
    if pp * vpp > layers:
        return
    counts = [len(chunk) for chunk in StageTable.even(layers, pp=pp, vpp=vpp).layers]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
