"""`megackpt.check`: what one rank's state dict declares, as a table, before any rank is started.

A save proves that the parts of all ranks make up each array. It cannot see that a part is one matrix where
the model has two: a fused weight that is declared as one cut is read in another order at another tp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor, is_main_replica
from megackpt.entities.flatten import flatten_state
from megackpt.entities.plain_tensors import is_plain_tensor
from megackpt.entities.tree import iter_leaves

_FUSED_NAME = re.compile(
    r"gate_?up|up_?gate|gated|qkv|query_key_value|kv_proj|key_value|w13|w1_?w3|in_proj|linear_fc1|swiglu|glu"
)
"""Names under which models keep several matrices in one weight."""

_YES_OR_NO = {True: "yes", False: "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredArray:
    """An array that a rank declares.

    Attributes:
        key: its key.
        kind: `cut` for a part of it, or `whole`.
        dtype: its dtype.
        global_shape: its shape.
        part: this rank's part, as text.
        nbytes: bytes on this rank.
        writes: whether this rank has the main replica.
    """

    key: str
    kind: str
    dtype: str
    global_shape: tuple[int, ...]
    part: str
    nbytes: int
    writes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclarationReport:
    """The result of `megackpt.check`; its text is a table.

    Attributes:
        arrays: the arrays, in the order of the state dict.
        objects: unique keys of objects.
        common: names of what is common state.
        common_nbytes: bytes of the tensors among it.
        fused: for each weight with components, what another tp reads.
        suspects: weights whose names say that they are fused, and that are declared as one cut, with what
            another tp would read and how to declare them.
    """

    arrays: tuple[DeclaredArray, ...]
    objects: tuple[str, ...]
    common: tuple[str, ...]
    common_nbytes: int
    fused: tuple[str, ...]
    suspects: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("key", "kind", "dtype", "global shape", "this rank's part", "bytes", "written here")]
        rows += [
            (
                a.key,
                a.kind,
                a.dtype,
                str(a.global_shape),
                a.part,
                f"{a.nbytes:,}",
                "yes" if a.writes else "no",
            )
            for a in self.arrays
        ]
        rows += [(key, "object", "", "", "", "", "") for key in self.objects]
        rows += [(name, "common", "", "", "rank 0's", "", "") for name in self.common]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        sums = ", ".join(
            f"{sum(a.kind == kind for a in self.arrays)} {kind} ({self._nbytes(kind):,} bytes)"
            for kind in ("cut", "whole")
        )
        lines.append(
            f"arrays: {sums}; objects: {len(self.objects)}; common state: {len(self.common)} leaves "
            f"({self.common_nbytes:,} bytes)"
        )
        if self.fused:
            lines += ["At another tp, of weights with components:", *(f"  {text}" for text in self.fused)]
        if self.suspects:
            lines += ["Fused by name, and declared as one cut:", *(f"  {text}" for text in self.suspects)]
        return "\n".join(lines)

    def _nbytes(self, kind: str) -> int:
        return sum(a.nbytes for a in self.arrays if a.kind == kind)


def check(sharded_state_dict: ShardedStateDict) -> DeclarationReport:
    """Return what a sharded state dict of one rank declares, with sizes, as a table. Local.

    No other rank is needed, and nothing is written: `ParallelGroups.offline` builds the model of any rank.
    Print the result, and look at the weights that are named at its end.

    Args:
        sharded_state_dict: as for `megackpt.save`; tensors may have no data.

    Raises:
        DeclarationError: the declarations of this rank contradict each other.
    """
    flattened = flatten_state(sharded_state_dict, rank=0, ranks=1)
    layouts = [leaf for _, leaf in iter_leaves(sharded_state_dict) if isinstance(leaf, ShardedLayout)]
    of_layouts = {f"{layout.key}.{component.name}" for layout in layouts for component in layout.components}
    common = list(iter_leaves({} if not isinstance(flattened.common, (dict, list)) else flattened.common))
    tensors = [leaf for _, leaf in common if is_plain_tensor(leaf)]
    return DeclarationReport(
        arrays=tuple(map(_declared, flattened.tensors)),
        objects=tuple(o.unique_key for o in flattened.objects),
        common=tuple(path for path, _ in common),
        common_nbytes=sum(t.numel() * t.element_size() for t in tensors),
        fused=tuple(text for layout in layouts for text in _components(layout)),
        suspects=tuple(
            _suspicion(tensor)
            for tensor in flattened.tensors
            if tensor.key not in of_layouts and _is_suspect(tensor)
        ),
    )


def _declared(tensor: ShardedTensor) -> DeclaredArray:
    box, flat = tensor.box_shape, tensor.flattened_range
    count = math.prod(box) if flat is None else flat.stop - flat.start
    part = ", ".join(f"{o}:{o + n}" for o, n in zip(tensor.global_offset, box, strict=True))
    return DeclaredArray(
        key=tensor.key,
        kind="whole" if box == tensor.global_shape and count == math.prod(box) else "cut",
        dtype=str(tensor.dtype).removeprefix("torch."),
        global_shape=tensor.global_shape,
        part=f"[{part}]" + ("" if flat is None else f" flat {flat.start}:{flat.stop}"),
        nbytes=count * tensor.dtype.itemsize,
        writes=is_main_replica(tensor.replica_id),
    )


def _components(layout: ShardedLayout) -> Iterator[str]:
    """Yield what a load at another tp reads of each component of a fused weight."""
    for component in layout.components:
        axes = _cut_axes(component.view.shape, component.global_shape, layout.prepend_axis_num)
        how = "all of it on each rank" if not axes else f"equal parts along axis {', '.join(map(str, axes))}"
        yield f"{layout.key}.{component.name} {component.global_shape}: {how}, an array of its own"


def _cut_axes(box: Sequence[int], whole: Sequence[int], prepended: int) -> list[int]:
    own = whole[prepended:]
    return [prepended + i for i, (local, extent) in enumerate(zip(box, own, strict=True)) if local != extent]


def _is_suspect(tensor: ShardedTensor) -> bool:
    cut = _cut_axes(tensor.local_shape, tensor.global_shape, tensor.prepend_axis_num)
    is_state = tensor.key.startswith("optimizer.")  # the weight itself is named once
    return bool(cut) and not is_state and _FUSED_NAME.search(tensor.key.lower()) is not None


def _suspicion(tensor: ShardedTensor) -> str:
    axis = _cut_axes(tensor.local_shape, tensor.global_shape, tensor.prepend_axis_num)[0]
    dim = axis - tensor.prepend_axis_num
    extent, whole, first = tensor.local_shape[dim], tensor.global_shape[axis], tensor.global_offset[axis]
    parts = -(-whole // max(extent, 1))
    starts = np.arange(min(parts, 3)) * extent
    ranges = ", ".join(f"[{start}:{start + extent}) of rank {i}" for i, start in enumerate(starts.tolist()))
    half = extent // 2
    return (
        f"{tensor.key!r} {tensor.global_shape}, cut along axis {axis}: tp=1 reads {ranges}"
        f"{', ...' if parts > 3 else ''}, each as it is. If each rank's part has two matrices, such as gate "
        f"and up, they would alternate: gate of rank 0, up of rank 0, gate of rank 1. Then declare them: "
        f"ShardedLayout.split({tensor.key!r}, data, {dim}, {{'gate': {half}, 'up': {extent - half}}}, "
        f"({axis}, {first // max(extent, 1)}, {parts}))."
    )
