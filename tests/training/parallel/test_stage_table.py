"""Tables of pipeline stages, by example and by laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy, booleans, composite, integers, lists

from megackpt import DeclarationError
from megackpt.parallel import StageTable


def test_an_even_table_of_two_virtual_stages_is_megatrons() -> None:
    # Megatron: the first layer of a chunk is vp_stage * (L / vpp) + pp_rank * (L / pp / vpp).
    table = StageTable.even(16, pp=4, vpp=2)
    for stage in range(4):
        for virtual_stage in range(2):
            first = virtual_stage * 8 + stage * 2
            assert table.layers_of(stage, virtual_stage) == (first, first + 1)


def test_what_cannot_be_divided_goes_to_the_first_stages() -> None:
    assert StageTable.even(5, pp=2).layers == ((0, 1, 2), (3, 4))


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
    ],
)
def test_what_does_not_fit_is_an_error(ask: Callable[[], object], message: str) -> None:
    EVEN.check_num_layers(4)
    EVEN.check_layout(pp=2, vpp=1)
    with pytest.raises(DeclarationError, match=message):
        ask()


@pytest.mark.parametrize("value", [None, {}, {"layout": "EtL"}, {"layout": "EtL", "pp": "x"}])
def test_json_that_is_no_table_is_rejected(value: Any) -> None:
    with pytest.raises(DeclarationError, match=r"does not describe a stage table.*to_json"):
        StageTable.from_json(value)


UNTIMED = settings(deadline=None)  # a busy machine is no error


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


@UNTIMED
@given(table=tables())
def test_a_table_is_read_back_from_its_string_and_its_json(table: StageTable) -> None:
    assert StageTable.from_string(str(table), pp=table.pp) == table
    assert StageTable.from_json(table.to_json()) == table


@UNTIMED
@given(table=tables())
def test_chunks_in_the_order_of_the_forward_pass_have_all_layers(table: StageTable) -> None:
    visited = [
        layer for v in range(table.vpp) for stage in range(table.pp) for layer in table.layers_of(stage, v)
    ]
    assert visited == list(range(table.num_layers))
    for layer in visited:
        assert layer in table.layers_of(*table.stage_of(layer))


@UNTIMED
@given(layers=integers(1, 40), pp=integers(1, 8), vpp=integers(1, 3))
def test_an_even_table_is_even(layers: int, pp: int, vpp: int) -> None:
    vpp = vpp if pp > 1 else 1
    if pp * vpp > layers:
        return
    counts = [len(chunk) for chunk in StageTable.even(layers, pp=pp, vpp=vpp).layers]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
