"""The shares of sequences that ranks of cp have: positions, balance, and the inverse. In one process."""

from __future__ import annotations

import pytest
import torch

from megackpt.errors import DeclarationError
from megackpt.parallel import (
    AttentionPart,
    Axis,
    ParallelGroups,
    ParallelLayout,
    attention_parts,
    causal_attention,
    context_positions,
    context_share,
    join_context,
    own_heads,
    tokens_to_heads,
)


def _axes(size: int) -> list[Axis]:
    return [ParallelGroups.offline(ParallelLayout(cp=size), rank).cp for rank in range(size)]


def test_a_rank_has_one_part_of_each_half_as_in_megatron() -> None:
    assert [context_positions(8, cp).tolist() for cp in _axes(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [context_positions(8, cp).tolist() for cp in _axes(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert context_positions(3, _axes(1)[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_cut_by_position_and_joined_again_along_any_dim(size: int) -> None:
    length = 2 * size * 3
    tokens = torch.arange(2 * length).view(2, length)
    hidden = torch.arange(length * 2 * 5).view(length, 2, 5)
    shares = [context_share(tokens, cp, dim=1) for cp in _axes(size)]
    states = [context_share(hidden, cp, dim=0) for cp in _axes(size)]
    for cp, share, state in zip(_axes(size), shares, states, strict=True):
        positions = context_positions(length, cp)
        assert torch.equal(share, tokens[:, positions])
        assert torch.equal(state, hidden[positions])
    assert torch.equal(join_context(shares, dim=1), tokens)
    assert torch.equal(join_context(shares, dim=-1), tokens)
    assert torch.equal(join_context(states, dim=0), hidden)


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (3, 2, [[0, 0, 1], [1, 2, 2]]),  # with as many heads of values for each: 0 1 2, 3 4 5 of 6
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_ranks_have_equally_many_heads_some_of_them_as_copies(
    heads: int, size: int, expected: list[list[int]]
) -> None:
    rows = torch.arange(heads).repeat_interleave(2).view(2 * heads, 1)  # of 2 channels each
    for cp, own in zip(_axes(size), expected, strict=True):
        assert own_heads(rows, heads, cp)[::2, 0].tolist() == own
        assert own_heads(rows, heads, cp)[1::2, 0].tolist() == own


def test_one_rank_of_cp_has_all_heads_of_all_tokens_already() -> None:
    (cp,) = _axes(1)
    x = torch.zeros(3, 1, 2)
    assert tokens_to_heads([x], [2], cp)[0] is x


@pytest.mark.parametrize("size", [2, 4, 5])
def test_every_rank_attends_to_equally_many_keys(size: int) -> None:
    length = 2 * size * 4
    pairs = {sum(int(position) + 1 for position in context_positions(length, cp)) for cp in _axes(size)}
    assert len(pairs) == 1


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 6), (1, 5)])
def test_the_mask_lets_a_query_attend_to_itself_and_to_what_is_before_it(queries: int, keys: int) -> None:
    part = AttentionPart(torch.zeros(1, queries, 4), torch.zeros(1, keys, 4), torch.zeros(1, keys, 4))
    position = torch.arange(keys - queries, keys)
    assert torch.equal(part.mask, torch.arange(keys) <= position.unsqueeze(1))
    assert part.is_square == (queries == keys)


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (2, 6), (1, 5)])
@pytest.mark.parametrize("window", [1, 2, 6, 9])
def test_with_a_window_a_query_attends_to_its_last_positions(window: int, queries: int, keys: int) -> None:
    part = AttentionPart(*(torch.zeros(1, n, 4) for n in (queries, keys, keys)), window)
    distance = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    assert torch.equal(part.mask, (distance >= 0) & (distance < window))


@pytest.mark.parametrize(("window", "scale"), [(None, 0.3), (2, None), (5, 0.7), (9, None)])
def test_attention_with_a_window_and_a_scale_is_that_of_the_definition(
    window: int | None, scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 5, 4, generator=generator).unbind()
    scores = q @ k.transpose(-1, -2) * (0.5 if scale is None else scale)
    mask = AttentionPart(q, k, v, window).mask
    expected = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v
    actual = causal_attention(q, k, v, _axes(1)[0], window=window, scale=scale)
    torch.testing.assert_close(actual, expected)


def test_without_cp_attention_has_one_part_of_the_same_tensors() -> None:
    q, k, v = torch.zeros(3, 1, 2, 5, 4).unbind()  # an odd number of tokens
    (part,) = attention_parts(q, k, v, _axes(1)[0])
    assert part.queries is q
    assert part.keys is k
    assert part.values is v


@pytest.mark.parametrize("length", [6, 2, 7])
def test_a_sequence_that_cannot_be_cut_is_an_error_with_what_fits(length: int) -> None:
    message = rf"sequence of {length} tokens .* 2 x cp=2 = 4 equal parts.*multiple of 4"
    with pytest.raises(DeclarationError, match=message) as caught:
        context_share(torch.zeros(1, length), _axes(2)[1], dim=1)
    assert caught.value.rank == 1
    with pytest.raises(DeclarationError, match=message):
        context_positions(length, _axes(2)[0])


def test_shares_that_cannot_be_cut_are_an_error() -> None:
    with pytest.raises(DeclarationError, match=r"Shares of 3 tokens.*multiple of 4"):
        join_context([torch.zeros(3), torch.zeros(3)], dim=0)
