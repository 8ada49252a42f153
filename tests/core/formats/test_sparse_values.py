"""Sparse tensors inside of pickled values: they load with each version of torch, their indices checked."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from megackpt import FormatError, UnserializableError
from megackpt.formats.safe_pickle import load_value, save_value

WHOLE = torch.tensor([[0.0, 2.0], [3.0, 0.0]])


def sparse(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that some layouts are new
        return WHOLE.to_sparse(layout=layout, **({} if layout not in BLOCKS else {"blocksize": (1, 1)}))


BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, *BLOCKS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_tensor_in_a_value_survives_where_warnings_are_errors(layout: torch.layout) -> None:
    data = save_value({"mask": sparse(layout)}, path="o")
    filters, checks = list(warnings.filters), torch.sparse.check_sparse_tensor_invariants.is_enabled()
    loaded: Any = load_value(data, where="w")["mask"]
    assert loaded.layout == layout
    assert torch.equal(loaded.to_dense(), WHOLE)
    assert warnings.filters == filters
    assert torch.sparse.check_sparse_tensor_invariants.is_enabled() == checks


def test_a_sparse_tensor_whose_indices_point_out_of_bounds_raises_an_error() -> None:
    indices, values = torch.tensor([[9], [0]]), torch.ones(1)
    tensor = torch.sparse_coo_tensor(indices, values, (2, 2), check_invariants=False)
    out = io.BytesIO()
    torch.save(tensor, out)
    with pytest.raises(FormatError, match=r"w: torch\.load\(\) fails \(RuntimeError: .*The file is damaged"):
        load_value(out.getvalue(), where="w")
    with pytest.raises(UnserializableError, match=r"o: the value holds size is inconsistent with indices"):
        save_value(tensor, path="o")
