"""Rows of several arrays that alternate in one tensor.

Queries, keys and values follow each other group by group, gate and up block by block. Each becomes an array
of its own, whose rows are in the order of the heads or features: what our layers and Hugging Face store.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megackpt.contrib.transformer_engine.quantised import without_codes
from megackpt.contrib.transformer_engine.site import Site
from megackpt.entities import LayoutComponent, RankOffset, ShardedBase, ShardedLayout
from megackpt.plans.geometry import View


def declare_alternating(
    name: str,
    value: Tensor,
    pattern: Mapping[str, int],
    site: Site,
    *,
    is_cut: bool,
    axes: tuple[RankOffset, ...] | None = None,
) -> ShardedBase:
    """Declare a tensor along whose dim 0 a pattern of rows repeats. Local.

    Args:
        name: of the tensor; its component `q` is stored as `name.q`.
        value: the local tensor.
        pattern: the number of rows of each component in one repetition, in order.
        site: where the module is.
        is_cut: whether tp cuts the repetitions; otherwise all ranks of tp have all of them.
        axes: `(axis, index, fragments)` of the leading axes that the tensor lacks; None for those of `site`.

    >>> from megackpt.training.parallel import ParallelGroups, ParallelLayout
    >>> import torch
    >>> site = Site(ParallelGroups.offline(ParallelLayout(), 0), "", (), None)
    >>> rows = declare_alternating("w", torch.arange(6), {"q": 2, "k": 1}, site, is_cut=False)
    >>> [(t.key, t.data.tolist(), t.global_offset) for t in rows.tensors()]
    [('w.q', [0, 1], (0,)), ('w.k', [2], (0,)), ('w.q', [3, 4], (2,)), ('w.k', [5], (1,))]
    """
    axes = site.stack if axes is None else axes
    tp, width = site.groups.tp, sum(pattern.values())
    repeats = value.shape[0] // width
    first, total = (tp.rank * repeats, tp.size * repeats) if is_cut else (0, repeats)
    components = []
    for repeat in range(repeats):
        start = repeat * width
        for component, rows in pattern.items():
            view = View.of(value.shape).narrow(0, start, rows)
            components.append(_component(component, view, first + repeat, total, axes))
            start += rows
    layout = ShardedLayout(
        site.key(name),
        without_codes(value),
        tuple(value.shape),
        tuple(components),
        replica_id=(0, 0 if is_cut else tp.rank, site.groups.dp_cp.rank),
        prepend_axis_num=len(axes),
    )
    return site.declare_codes(axes, layout, value, is_cut=is_cut)


def _component(
    name: str, view: View, index: int, total: int, axes: tuple[RankOffset, ...]
) -> LayoutComponent:
    rows, *others = view.shape
    layers = tuple(n for _, _, n in axes)
    return LayoutComponent(
        name,
        view,
        global_shape=(*layers, rows * total, *others),
        global_offset=(*(i for _, i, _ in axes), rows * index, *(0 for _ in others)),
        axis_fragmentations=(*layers, total, *(1 for _ in others)),
    )
