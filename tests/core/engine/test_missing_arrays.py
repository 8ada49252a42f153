"""A declaration may say that a load keeps its data if the checkpoint lacks the array."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import megackpt
from megackpt.errors import MissingKeyError
from megackpt.mapping import ShardedTensor


def declare(key: str, value: float, if_missing: Literal["error", "keep"]) -> ShardedTensor:
    data = torch.full((2,), value)
    return ShardedTensor(key, data, data.dtype, (2,), (2,), (0,), if_missing=if_missing)


@pytest.mark.parametrize("strict", ["assume_ok_unexpected", "raise_all", "raise_unexpected", "log_all"])
def test_a_missing_array_is_kept_where_it_is_declared_so(tmp_path: Path, strict: str) -> None:
    megackpt.save({"old": declare("old", 1.0, "error")}, tmp_path)
    request = {"old": declare("old", 5.0, "keep"), "new": declare("new", 7.0, "keep")}
    loaded = megackpt.load(request, tmp_path, strict=strict)
    assert loaded["old"].tolist() == [1.0, 1.0]
    assert loaded["new"].tolist() == [7.0, 7.0]


def test_a_missing_array_is_an_error_otherwise(tmp_path: Path) -> None:
    megackpt.save({"old": declare("old", 1.0, "error")}, tmp_path)
    with pytest.raises(MissingKeyError, match="new"):
        megackpt.load({"new": declare("new", 7.0, "error")}, tmp_path)
