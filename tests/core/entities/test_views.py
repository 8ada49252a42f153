"""A view says of a flat shard what torch says of the whole: same elements, same places, one memory."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt.geometry import View
from megackpt.mapping.layout import chunks_of_view, whole_view
from megackpt.testing.layout_programs import LayoutProgram, layout_programs
from tests.support.effort import few


@st.composite
def viewed(draw: st.DrawFn) -> tuple[View, torch.Tensor]:
    """A view, and the same view made by torch of an array that holds its own positions."""
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    array = torch.arange(math.prod(shape)).reshape(shape)
    view, block = View.of(shape), array
    for _ in range(draw(st.integers(0, 4))):
        axes = len(view.axes)
        change = draw(st.sampled_from(["unflatten", "transpose", "narrow"])) if axes else "transpose"
        if change == "transpose":
            order = draw(st.permutations(range(axes)))
            view, block = view.transpose(order), block.permute(order)
            continue
        axis = draw(st.integers(0, axes - 1))
        extent = view.shape[axis]
        if change == "unflatten":
            inner = draw(st.sampled_from([n for n in (1, 2, 3, extent) if n and extent % n == 0]))
            view, block = view.unflatten(axis, (-1, inner)), block.unflatten(axis, (extent // inner, inner))
        else:
            start = draw(st.integers(0, extent))
            length = draw(st.integers(0, extent - start))
            view, block = view.narrow(axis, start, length), block.narrow(axis, start, length)
    return view, block


@settings(max_examples=few(125, of=1000), deadline=None)
@given(viewed())
def test_a_view_has_the_elements_that_torch_finds(pair: tuple[View, torch.Tensor]) -> None:
    view, block = pair
    positions = torch.arange(math.prod(view.base)).reshape(view.base)
    assert view.shape == tuple(block.shape)
    assert torch.equal(whole_view(view, positions), block)  # type: ignore[arg-type]
    turned = positions.mT.contiguous().mT if positions.ndim > 1 else positions  # equal, other strides
    assert torch.equal(whole_view(view, turned), block)  # type: ignore[arg-type]


@settings(max_examples=few(125, of=1000), deadline=None)
@given(viewed(), st.data())
def test_the_chunks_of_a_flat_shard_are_its_elements_each_once_and_in_place(
    pair: tuple[View, torch.Tensor], data: st.DataObject
) -> None:
    view, block = pair
    numel = math.prod(view.base)
    start, stop = sorted((data.draw(st.integers(0, numel)), data.draw(st.integers(0, numel))))
    stride = data.draw(st.integers(1, 2))
    shard = torch.arange(start * stride, stop * stride)[::stride]  # position p holds p * stride
    actual = torch.full(tuple(block.shape), -1)
    parts = chunks_of_view(view, shard, slice(start, stop))
    for share in parts:
        location = actual[tuple(slice(a, a + n) for a, n in zip(share.start, share.shape, strict=True))]
        assert share.data is not None
        assert share.data.numel() > 0
        assert share.data.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
        if share.flattened_range is None:
            assert bool((location == -1).all())
            location.copy_(share.data)
        else:
            flat = location.reshape(-1)
            flat[share.flattened_range] = share.data
            location.copy_(flat.view(location.shape))
    owned = (block >= start) & (block < stop)
    assert torch.equal(actual, torch.where(owned, block * stride, -1))
    assert len(parts) <= max(1, 2 * len(view.axes) - 1)


@settings(max_examples=few(62, of=500), deadline=None)
@given(layout_programs(), st.sampled_from([1, 2, 3, 6]))
def test_a_layout_has_the_parts_that_torch_makes_by_the_same_steps(
    program: LayoutProgram, owned: int
) -> None:
    local = torch.arange(math.prod(program.local_shape(owned))).reshape(program.local_shape(owned))
    expected = program.views(local, owned)
    views = program.layout(owned, key="w").views
    assert list(views) == list(expected)
    assert all(torch.equal(whole_view(views[name], local), part) for name, part in expected.items())  # type: ignore[arg-type]
    assert sum(view.numel for view in views.values()) == local.numel()
