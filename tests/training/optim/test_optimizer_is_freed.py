"""A model and its optimizer are freed when nobody refers to them, with their buffers and process groups."""

from __future__ import annotations

import gc
import weakref

import torch

from megackpt.optim import DistributedOptimizer
from megackpt.parallel import ParallelGroups, ParallelLayout


def test_a_trained_model_is_freed() -> None:
    model = torch.nn.Linear(3, 2)
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.Adam(p, lr=0.1), groups)
    model(torch.ones(4, 3)).sum().backward()
    buffer = weakref.ref(optimizer.buffers[0])
    alive = weakref.ref(model)
    del model, optimizer, groups
    gc.collect()
    assert alive() is None
    assert buffer() is None
