"""Laws of stage tables: a layout string says all of a table, and each layer has exactly one chunk."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy, booleans, composite, integers, lists

from megackpt.parallel import StageTable

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
