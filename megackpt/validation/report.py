"""What a load did, key by key: the load report.

Owns the report and its text. Making it from a plan is `request`'s affair; what is an error in it was decided
by rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megackpt.errors import truncated_list
from megackpt.validation.load_times import LoadTimes
from megackpt.validation.mended import Mended


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReport:
    """How one array was loaded on this rank.

    Attributes:
        key: as asked for.
        stored_dtype: dtype in the checkpoint.
        dtype: dtype asked for.
        stored_shape: global shape in the checkpoint.
        global_shape: global shape asked for.
        nbytes: bytes of this rank's chunks of it, in the dtype asked for.
        padded_nbytes: how many of these are not stored and became 0.
        resharded: whether some chunk is not exactly a stored one.
    """

    key: str
    stored_dtype: str
    dtype: str
    stored_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    nbytes: int
    padded_nbytes: int
    resharded: bool

    @property
    def is_cast(self) -> bool:
        """Whether values were converted to another dtype."""
        return self.dtype != self.stored_dtype

    @property
    def is_padded(self) -> bool:
        """Whether the array asked for is larger than the stored one along some axis."""
        return any(a > b for a, b in zip(self.global_shape, self.stored_shape, strict=True))

    @property
    def is_cut(self) -> bool:
        """Whether the array asked for is smaller than the stored one along some axis."""
        return any(a < b for a, b in zip(self.global_shape, self.stored_shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, as one rank saw it.

    Attributes:
        arrays: the arrays that were loaded.
        objects: unique keys of the objects that were loaded.
        missing: keys in the checkpoint that no rank asked for.
        unexpected: keys this rank asked for that the checkpoint lacks; nothing was loaded for them.
        excluded: keys this rank asked for that `LoadOptions.exclude` left out.
        mended: bytes that came from another source, as those of the checkpoint are damaged; see
            `LoadOptions.on_corrupt`.
        times: how long reading, exchanging and copying took on all ranks; None before they are done.
    """

    arrays: tuple[ArrayReport, ...] = ()
    objects: tuple[str, ...] = ()
    missing: frozenset[str] = field(default_factory=frozenset)
    unexpected: frozenset[str] = field(default_factory=frozenset)
    excluded: frozenset[str] = field(default_factory=frozenset)
    mended: tuple[Mended, ...] = ()
    times: LoadTimes | None = None

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of everything that was loaded."""
        return (*(a.key for a in self.arrays), *self.objects)

    @property
    def cast(self) -> tuple[ArrayReport, ...]:
        """Arrays whose values were converted."""
        return tuple(a for a in self.arrays if a.is_cast)

    @property
    def padded(self) -> tuple[ArrayReport, ...]:
        """Arrays that are larger than what is stored."""
        return tuple(a for a in self.arrays if a.is_padded)

    @property
    def cut(self) -> tuple[ArrayReport, ...]:
        """Arrays that are smaller than what is stored."""
        return tuple(a for a in self.arrays if a.is_cut)

    @property
    def resharded(self) -> tuple[ArrayReport, ...]:
        """Arrays that were stored in other chunks than this rank asked for."""
        return tuple(a for a in self.arrays if a.resharded)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays on this rank."""
        return sum(a.nbytes for a in self.arrays)

    def __str__(self) -> str:
        lines = [
            f"loaded {len(self.arrays)} arrays ({self.nbytes:,} bytes on this rank), {len(self.objects)} "
            f"objects"
        ]
        for name in ("resharded", "cast", "padded", "cut"):
            arrays: tuple[ArrayReport, ...] = getattr(self, name)
            if arrays:
                lines.append(f"{name}: {len(arrays)} arrays, {sum(a.nbytes for a in arrays):,} bytes")
                if name != "resharded":
                    lines.append(truncated_list([_difference(a) for a in arrays]))
        for name in ("missing", "unexpected", "excluded"):
            keys: frozenset[str] = getattr(self, name)
            if keys:
                lines += [f"{name}: {len(keys)}", truncated_list(sorted(keys))]
        if self.mended:
            lines += [f"mended: {len(self.mended)}", truncated_list([str(m) for m in self.mended])]
        return "\n".join(lines)


def _difference(array: ArrayReport) -> str:
    stored, asked = f"{array.stored_dtype} {array.stored_shape}", f"{array.dtype} {array.global_shape}"
    padding = f", {array.padded_nbytes:,} bytes of 0" if array.padded_nbytes else ""
    return f"{array.key!r}: stored as {stored}, loaded as {asked}{padding}"
