"""Declared layouts, and views of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megackpt import load, save
from megackpt.entities import Layout, LayoutComponent, ShardedLayout, ShardedTensor
from megackpt.entities.layout import chunks_of_view, whole_view
from megackpt.errors import DeclarationError
from megackpt.plans.geometry import View
from megackpt.testing.layout_programs import LayoutProgram, layout_programs
from tests.support.effort import few


def stored(layout: ShardedLayout) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {t.key: (t.global_shape, t.global_offset) for t in layout.tensors()}


def test_split_stores_each_part_under_a_key_of_its_own() -> None:
    w = torch.arange(12.0).reshape(6, 2)
    layout = ShardedLayout.split("fc1", w, 0, {"gate": 2, "up": 4}, (0, 3, 8), (1, 1, 2), prepend_axis_num=1)
    assert stored(layout) == {"fc1.gate": ((8, 4, 2), (3, 2, 0)), "fc1.up": ((8, 8, 2), (3, 4, 0))}


def test_interleaved_query_groups_are_stored_apart_with_the_groups_as_an_axis() -> None:
    qkv = torch.arange(8 * 3.0).reshape(8, 3)  # 2 groups of q q k v, head dim 1
    layout = ShardedLayout.interleave("qkv", qkv, 0, {"q": 2, "k": 1, "v": 1}, (0, 1, 2))
    assert stored(layout) == {
        "qkv.q": ((4, 2, 3), (2, 0, 0)),
        "qkv.k": ((4, 1, 3), (2, 0, 0)),
        "qkv.v": ((4, 1, 3), (2, 0, 0)),
    }
    q, k, v = (t.data for t in layout.tensors())
    assert torch.equal(q, qkv[[0, 1, 4, 5]].view(2, 2, 3))  # type: ignore[arg-type]
    assert torch.equal(k, qkv[[2, 6]].view(2, 1, 3))  # type: ignore[arg-type]
    assert torch.equal(v, qkv[[3, 7]].view(2, 1, 3))  # type: ignore[arg-type]


def test_stacked_slabs_get_an_axis_after_the_prepended_ones() -> None:
    experts = torch.arange(2 * 6.0).reshape(2, 6)  # [h, 3 experts of width 2]
    layout = ShardedLayout.stack("experts", experts, 1, 3, (0, 1, 2), (1, 2, 4), prepend_axis_num=1)
    assert stored(layout) == {"experts": ((2, 12, 2, 2), (1, 6, 0, 0))}
    (tensor,) = layout.tensors()
    assert torch.equal(tensor.data, torch.stack(experts.split(2, dim=1)))  # type: ignore[arg-type]


def test_a_transposed_tensor_is_stored_with_its_dims_in_the_given_order() -> None:
    w = torch.arange(24.0).reshape(2, 3, 4)
    layout = ShardedLayout.transpose("w", w, (2, 0, 1), (0, 1, 2))
    assert stored(layout) == {"w": ((8, 2, 3), (4, 0, 0))}
    assert torch.equal(layout.tensors()[0].data, w.permute(2, 0, 1))  # type: ignore[arg-type]


def test_compositions_name_parts_of_parts_and_count_axes_as_they_stand() -> None:
    layout = (
        Layout.of((4, 6))
        .split(0, {"a": 1, "b": 3})
        .transpose((1, 0))
        .unflatten(0, (2, -1))
        .split(1, {"x": 1, "y": 2})
    )
    assert {name: view.shape for name, view in layout.views.items()} == {
        "a.x": (2, 1, 1),
        "a.y": (2, 2, 1),
        "b.x": (2, 1, 3),
        "b.y": (2, 2, 3),
    }


WHOLE: dict[str, Callable[[torch.Tensor], ShardedLayout]] = {
    "split": lambda t: ShardedLayout.split("w", t, 1, {"a": 1, "b": 5}),
    "interleave": lambda t: ShardedLayout.interleave("w", t, 0, {"a": 1, "b": 2}),
    "stack": lambda t: ShardedLayout.stack("w", t, 1, 3),
    "transpose": lambda t: ShardedLayout.transpose("w", t, (1, 0)),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_every_layout_saved_whole_loads_in_place_into_flat_shards_and_back(
    make: Callable[[torch.Tensor], ShardedLayout], tmp_path: Path
) -> None:
    w = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    save({"w": make(w)}, tmp_path / "whole")
    shards = [torch.zeros(13), torch.zeros(0), torch.zeros(23)]
    ranges = [slice(0, 13), slice(13, 13), slice(13, 36)]
    flat = [
        make(torch.empty(6, 6)).retarget(key="w", data=data, flattened_range=r)
        for data, r in zip(shards, ranges, strict=True)
    ]
    loaded = load({"w": flat}, tmp_path / "whole")["w"]
    assert all(got is shard for got, shard in zip(loaded, shards, strict=True))
    assert torch.equal(torch.cat(shards), w.reshape(-1))
    save({"w": flat}, tmp_path / "flat")
    again = torch.zeros(6, 6)
    load({"w": make(again)}, tmp_path / "flat")
    assert torch.equal(again, w)


def test_what_a_layout_stores_loads_as_plain_tensors(tmp_path: Path) -> None:
    w = torch.arange(24.0).reshape(6, 4)
    save({"w": ShardedLayout.interleave("w", w, 0, {"a": 1, "b": 2})}, tmp_path / "c")
    rows = ShardedTensor.from_rank_offsets("w.b", torch.zeros(2, 2, 4))
    assert torch.equal(load({"b": rows}, tmp_path / "c")["b"], w.view(2, 3, 4)[:, 1:])


def test_a_padded_layout_loads_the_overlap_of_each_part_and_has_zeros_elsewhere(tmp_path: Path) -> None:
    save({"w": ShardedLayout.split("w", torch.ones(4, 3), 0, {"a": 2, "b": 2})}, tmp_path / "c")
    wider = torch.full((4, 5), 7.0)
    layout = ShardedLayout.split("w", wider, 0, {"a": 2, "b": 2}, allow_shape_mismatch=True)
    assert all(t.allow_shape_mismatch for t in layout.tensors())
    load({"w": layout}, tmp_path / "c")
    assert wider.tolist() == [[1, 1, 1, 0, 0]] * 4


def test_a_part_without_elements_is_declared_by_flat_shards_too() -> None:
    layout = ShardedLayout.split("w", torch.zeros(4, 2), 0, {"none": 0, "all": 4})
    flat = layout.retarget(key="w", data=torch.zeros(3), flattened_range=slice(2, 5))
    assert [(t.key, t.local_shape, t.global_shape) for t in flat.tensors()] == [
        ("w.none", (0, 2), (0, 2)),
        ("w.all", (4, 2), (4, 2)),
    ]


def test_a_layout_without_data_declares_the_same_boxes() -> None:
    layout = ShardedLayout.stack("w", torch.zeros(2, 6), 1, 3, (0, 1, 4), replica_id=(0, 0, 1))
    bare = layout.without_data()
    assert stored(bare) == stored(layout)
    assert [(t.data, t.replica_id) for t in bare.tensors()] == [(None, (0, 0, 1))]


def test_data_of_any_strides_is_viewed_in_place() -> None:
    w = torch.zeros(4, 6).t()  # [6, 4], column major
    for tensor in ShardedLayout.interleave("w", w, 0, {"a": 1, "b": 2}).tensors():
        assert tensor.data is not None
        tensor.data.fill_(1.0)
    assert bool((w == 1).all())


REJECTED: dict[str, tuple[Callable[[torch.Tensor], ShardedLayout], str]] = {
    "sizes": (
        lambda t: ShardedLayout.split("w", t, 0, {"a": 1, "b": 2}),
        "'w': components {'a': 1, 'b': 2} do not add up to axis 0 of the shape (6, 4). Give the local size",
    ),
    "negative size": (lambda t: ShardedLayout.split("w", t, 0, {"a": -1, "b": 7}), "do not add up to axis 0"),
    "axis": (
        lambda t: ShardedLayout.split("w", t, 2, {"a": 6}),
        "do not add up to axis 2 of the shape (6, 4)",
    ),
    "name": (lambda t: ShardedLayout.split("w", t, 0, {"": 6}), "need non-empty names: each is stored under"),
    "pattern": (
        lambda t: ShardedLayout.interleave("w", t, 0, {"a": 1, "b": 3}),
        "'w': the pattern {'a': 1, 'b': 3} does not repeat along axis 0 of (6, 4)",
    ),
    "empty pattern": (lambda t: ShardedLayout.interleave("w", t, 0, {}), "the pattern {} does not repeat"),
    "pattern axis": (
        lambda t: ShardedLayout.interleave("w", t, 2, {"a": 5}),
        "There is no axis 2 among the 2 of shape (6, 4)",
    ),
    "count": (
        lambda t: ShardedLayout.stack("w", t, 0, 4),
        "'w': Axis 0 of extent 6 does not split into (4, 1). Give sizes that multiply to the extent",
    ),
    "stack axis": (
        lambda t: ShardedLayout.stack("w", t, 5, 2),
        "There is no axis 5 among the 2 of shape (6, 4)",
    ),
    "order": (
        lambda t: ShardedLayout.transpose("w", t, (0, 0)),
        "(0, 0) does not name each of the 2 axes once",
    ),
    "rank offset": (
        lambda t: ShardedLayout.stack("w", t, 0, 2, (3, 0, 2)),
        "'w': invalid rank offset (axis=3",
    ),
    "key": (
        lambda t: ShardedLayout.split("", t, 0, {"a": 6}),
        "the key of a ShardedLayout must be a non-empty",
    ),
    "replica": (
        lambda t: ShardedLayout.split("w", t, 0, {"a": 6}, replica_id=None),  # type: ignore[arg-type]
        "replica_id None must be an int or a tuple of ints",
    ),
    "other tensor": (
        lambda t: ShardedLayout.of("w", t, Layout.of((4, 6))),
        "'w': data has shape (6, 4) but local_shape means (4, 6)",
    ),
    "no tensor": (
        lambda t: ShardedLayout.of("w", t.numpy(), Layout.of((6, 4))),  # type: ignore[arg-type]
        "data must be a torch.Tensor or None, not ndarray",
    ),
    "flat range": (
        lambda t: ShardedLayout.transpose("w", t, (1, 0)).retarget(
            key="w", data=t.reshape(-1), flattened_range=slice(1, 25)
        ),
        "flattened_range slice(1, 25, None) must be slice(start, stop) without a step, inside the 24",
    ),
    "hole": (
        lambda t: ShardedLayout(
            "w", t, (6, 4), (LayoutComponent("a", View.of((6, 4)).narrow(0, 0, 5), (5, 4), (0, 0), (1, 1)),)
        ),
        "'w': the components ['a'] do not cover local_shape (6, 4). Build them with a Layout",
    ),
}


@pytest.mark.parametrize(("make", "text"), REJECTED.values(), ids=REJECTED)
def test_a_layout_that_does_not_fit_its_tensor_raises_an_error(
    make: Callable[[torch.Tensor], ShardedLayout], text: str
) -> None:
    with pytest.raises(DeclarationError, match=re.escape(text)):
        make(torch.zeros(6, 4))


def test_a_layout_without_data_or_dtype_cannot_be_declared() -> None:
    bare = ShardedLayout("w", None, (2,), (LayoutComponent("", View.of((2,)), (2,), (0,), (1,)),))
    with pytest.raises(DeclarationError, match="'w': a layout needs data or a dtype"):
        bare.tensors()


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


@settings(max_examples=few(60, of=1000), deadline=None)
@given(viewed())
def test_a_view_has_the_elements_that_torch_finds(pair: tuple[View, torch.Tensor]) -> None:
    view, block = pair
    positions = torch.arange(math.prod(view.base)).reshape(view.base)
    assert view.shape == tuple(block.shape)
    assert torch.equal(whole_view(view, positions), block)  # type: ignore[arg-type]
    turned = positions.mT.contiguous().mT if positions.ndim > 1 else positions  # equal, other strides
    assert torch.equal(whole_view(view, turned), block)  # type: ignore[arg-type]


@settings(max_examples=few(60, of=1000), deadline=None)
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


@settings(max_examples=few(40, of=500), deadline=None)
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
