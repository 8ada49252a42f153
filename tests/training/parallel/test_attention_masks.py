"""Which keys the queries of a part of a sequence attend to, compared with the definition."""

from __future__ import annotations

import pytest
import torch

from megackpt.parallel import AttentionPart


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 3), (2, 5), (1, 4)])
def test_a_query_attends_to_its_own_position_and_those_before_it_in_its_window(
    queries: int, keys: int, window: int | None
) -> None:
    heads, width = 6, 7  # neither is a number of positions
    q, k, v = torch.zeros(heads, queries, width), torch.zeros(heads, keys, width), torch.zeros(heads, keys, 2)
    part = AttentionPart(q, k, v, window)
    first = keys - queries  # the position of the first query
    expected = [
        [key <= first + query and (window is None or key > first + query - window) for key in range(keys)]
        for query in range(queries)
    ]
    assert part.mask.tolist() == expected
    assert part.is_square == (queries == keys)
