"""How tensor parallelism cuts one tensor: the value that a layer declares for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from megackpt.errors import DeclarationError
from megackpt.ground.arguments import check_count, check_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSharding:
    """How tp cuts one tensor; a plain int stands for `TpSharding(dim=...)`.

    Attributes:
        dim: dim of the local tensor that is cut; each rank has an equal slice.
        components: names and local extents along `dim` of the components of the slice, in order (gate and up;
            q, k and v). Each component is stored as a global array of its own, `key.name`.
        allow_shape_mismatch: the global extent may differ between checkpoint and model (vocabulary padding).
        unpadded_extent: how much of the global extent has values; the rest is padding. It needs
            allow_shape_mismatch. None: not known. See `ShardedTensor.unpadded_shape`.
        copies: how many neighbouring ranks have the same slice, where tp has more ranks than there are slices
            (key and value heads): a number, or a number by component. The layer sums their gradients over
            these ranks: see `copy_to_neighbours`.

    Raises:
        DeclarationError: both components and allow_shape_mismatch; copies of an unknown component, or fewer
            than 1.
    """

    dim: int
    components: Mapping[str, int] | None = None
    allow_shape_mismatch: bool = False
    copies: int | Mapping[str, int] = 1
    unpadded_extent: int | None = None

    def __post_init__(self) -> None:
        check_count("TpSharding.dim", self.dim, least=0)
        check_kind("TpSharding.components", self.components, Mapping, give="{name: extent}", optional=True)
        if self.unpadded_extent is not None:
            check_count("TpSharding.unpadded_extent", self.unpadded_extent, least=0)
            if not self.allow_shape_mismatch:
                raise DeclarationError(
                    f"unpadded_extent is {self.unpadded_extent} without allow_shape_mismatch: padding may "
                    f"differ. Set both."
                )
        if self.components is not None and self.allow_shape_mismatch:
            raise DeclarationError(
                f"a tensor made of components {list(self.components)} cannot have allow_shape_mismatch: "
                f"padding of one component would move the next. Declare a tensor for each one, or pad none."
            )
        named = self.copies if isinstance(self.copies, Mapping) else {}
        counts = named.values() if isinstance(self.copies, Mapping) else (self.copies,)
        if named.keys() - (self.components or {}).keys() or min(counts, default=1) < 1:
            raise DeclarationError(
                f"copies is {self.copies!r} for a tensor of components {list(self.components or ())}. Give "
                f"the number of ranks that have the same slice, at least 1, or one number for each component."
            )

    def copies_of(self, component: str) -> int:
        """Return how many neighbouring ranks have the same slice of a component ("": of the tensor)."""
        return self.copies.get(component, 1) if isinstance(self.copies, Mapping) else self.copies

    def shared_rows(self, extent: int) -> tuple[tuple[int, int, int], ...]:
        """Return `(start, stop, copies)` of the rows that several ranks have, of a dim of this extent."""
        rows: list[tuple[int, int, int]] = []
        start = 0
        for name, size in (self.components or {"": extent}).items():
            copies = self.copies_of(name)
            if rows and rows[-1][1:] == (start, copies):  # one range for k and v
                rows[-1] = (rows[-1][0], start + size, copies)
            elif copies > 1:
                rows.append((start, start + size, copies))
            start += size
        return tuple(rows)


Declarations: TypeAlias = Mapping[str, "int | TpSharding"]


def as_sharding(declared: int | TpSharding) -> TpSharding:
    """Return the sharding that a declaration stands for."""
    return declared if isinstance(declared, TpSharding) else TpSharding(dim=declared)
