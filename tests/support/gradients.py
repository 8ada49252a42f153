"""Gradients of all ranks as an optimizer reduces them, put together to global arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megackpt.mapping import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.parallel import ParallelGroups, all_reduce, is_marked


class Box(NamedTuple):
    """What one rank has of a global array."""

    key: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    data: Tensor


def tensors_of(state: ShardedStateDict) -> Iterator[ShardedTensor]:
    """Yield the tensors of a state dict; the components of a tensor one by one."""
    for entity in state.values():
        if isinstance(entity, ShardedLayout):
            yield from entity.tensors()
        elif isinstance(entity, ShardedTensor):
            yield entity


def gradient_boxes(model: nn.Module, state: ShardedStateDict, groups: ParallelGroups) -> list[Box]:
    """Return this rank's boxes of the gradients, under the keys of the parameters. Collective.

    Parameters that are frozen have none.
    """
    grads = {name: reduced(p, groups) for name, p in model.named_parameters() if p.requires_grad}
    entities = {name: e.retarget(key=e.key, data=grads[name]) for name, e in state.items() if name in grads}
    return [Box(t.key, t.global_shape, t.global_slice(), t.data) for t in tensors_of(entities)]


def reduced(param: Tensor, groups: ParallelGroups) -> Tensor:
    """Return the gradient of a parameter as an optimizer reduces it. Collective.

    The loss of each rank is the mean over its own tokens. So gradients of dense layers are averaged over
    dp x cp. Those of an expert are sums over the tokens that it got, from any rank of ep.
    """
    grad = param.grad
    assert grad is not None
    if is_marked(param, "expert_parallel"):
        if is_marked(param, "sequence_parallel"):
            grad = all_reduce(grad, groups.etp)
        return all_reduce(grad, groups.edp) / groups.dp_cp.size
    if is_marked(param, "sequence_parallel"):
        grad = all_reduce(grad, groups.tp)
    if is_marked(param, "shared_embedding"):
        grad = all_reduce(grad, groups.embedding)
    return all_reduce(grad, groups.dp_cp) / groups.dp_cp.size


def join(boxes: Iterable[Box]) -> dict[str, Tensor]:
    """Put the boxes of all ranks together; replicas have to agree bit for bit."""
    whole: dict[str, Tensor] = {}
    for key, shape, box, data in boxes:
        joined = whole.setdefault(key, torch.full(shape, float("nan")))
        known = ~joined[box].isnan()
        assert torch.equal(joined[box][known], data[known]), f"replicas of {key} differ"
        joined[box] = data
    return whole


def assert_close(actual: Tensor, expected: Tensor, what: str, *, relative: float) -> None:
    """Compare element by element, relative to the largest element."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= relative, f"{what}: off by {error:.1e} of the largest element"


def assert_all_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, relative: float
) -> None:
    """Compare arrays by key, each relative to its largest element."""
    assert actual.keys() == expected.keys()
    for key in expected:
        assert_close(actual[key], expected[key], key, relative=relative)
