"""The load report: how each array was loaded, which bytes were recovered, how long each phase took.

`request` makes the entries of arrays from a plan. The engine measures the times and records the recovered
bytes. Whether a difference is an error was decided before by `LoadRules`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from megackpt.errors import truncated_list


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayReport:
    """How one array was loaded on this rank.

    Attributes:
        key: key of the array in the request.
        stored_dtype: dtype in the checkpoint.
        dtype: requested dtype.
        stored_shape: global shape in the checkpoint.
        global_shape: requested global shape.
        nbytes: bytes of this rank's chunks of the array, in the requested dtype.
        padded_nbytes: how many of these are not stored and became 0.
        kept_nbytes: how many of these were not loaded and stayed as they were: rows of new tokens.
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
    kept_nbytes: int = 0

    @property
    def is_cast(self) -> bool:
        """Whether values were converted to another dtype."""
        return self.dtype != self.stored_dtype

    @property
    def is_padded(self) -> bool:
        """Whether the requested array is larger than the stored one along some axis."""
        return any(a > b for a, b in zip(self.global_shape, self.stored_shape, strict=True))

    @property
    def is_cut(self) -> bool:
        """Whether the requested array is smaller than the stored one along some axis."""
        return any(a < b for a, b in zip(self.global_shape, self.stored_shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredBytes:
    """Bytes that a load read from another source, because the checkpoint's own are damaged.

    Attributes:
        source: `parity` for bytes that were computed from parity, or the location of a copy.
        why: what is wrong with the bytes of the checkpoint.
        file: name of the damaged file in the checkpoint; empty if no single file is known.
        key: array or object that the bytes belong to; None for common state, the index and the commit.
        box: the stored chunk, as `ChunkTable.describe` writes it.
        start: first byte in the file, if known.
        stop: one past the last.
    """

    source: str
    why: str
    file: str = ""
    key: str | None = None
    box: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        of_chunk = " ".join(filter(None, (repr(self.key) if self.key is not None else "", self.box)))
        bytes_of = f"bytes {self.start}:{self.stop} of {self.file}" if self.start is not None else self.file
        return f"{', '.join(filter(None, (bytes_of, of_chunk)))}: taken from {self.source}"

    def is_continued_by(self, other: RecoveredBytes) -> bool:
        """Whether `other` begins in this range or at its end, and is of the same chunk and source."""
        if self.stop is None or other.start is None or other.start > self.stop:
            return False
        # All fields but the range and the reason have to be equal, also those that may be added later.
        return replace(self, start=other.start, stop=other.stop, why=other.why) == other


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds that one rank spent in the phases of a load. Phases overlap.

    Attributes:
        read: while reads from storage were under way.
        exchange: sending to other ranks and receiving from them, including waiting for them.
        copy: copying what other ranks sent from buffers into tensors.
    """

    read: float = 0.0
    exchange: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """The time of one phase over all ranks, in seconds."""

    min: float
    mean: float
    max: float

    def __str__(self) -> str:
        return f"min {self.min:.3f} s, mean {self.mean:.3f} s, max {self.max:.3f} s"


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """The phases of a load over all ranks.

    Attributes:
        read, exchange, copy: see `PhaseTimes`.
    """

    read: TimeSummary
    exchange: TimeSummary
    copy: TimeSummary

    @classmethod
    def over(cls, ranks: Sequence[PhaseTimes]) -> LoadTimes:
        """Summarise the times of all ranks; at least one."""

        def summary(phase: str) -> TimeSummary:
            times = [getattr(times, phase) for times in ranks]
            return TimeSummary(min(times), sum(times) / len(times), max(times))

        return cls(summary("read"), summary("exchange"), summary("copy"))

    def __str__(self) -> str:
        return "; ".join(f"{field.name}: {getattr(self, field.name)}" for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did, as one rank saw it.

    Attributes:
        arrays: the arrays that were loaded.
        objects: unique keys of the objects that were loaded.
        missing: keys in the checkpoint that no rank requested.
        unexpected: keys that this rank requested and the checkpoint lacks; nothing was loaded for them.
        excluded: keys that this rank requested and `LoadOptions.exclude` left out, or that the checkpoint
            lacks and that may be missing (`if_missing="keep"`).
        recovered: bytes that were read from another source, because the checkpoint's own are damaged; see
            `LoadOptions.on_corrupt`.
        times: how long reading, exchanging and copying took on all ranks; None until they are done.
        transformed: by key, what a factory makes of the stored arrays (`ShardedTensorFactory.how`), such as
            quantising them.
    """

    arrays: tuple[ArrayReport, ...] = ()
    objects: tuple[str, ...] = ()
    missing: frozenset[str] = field(default_factory=frozenset)
    unexpected: frozenset[str] = field(default_factory=frozenset)
    excluded: frozenset[str] = field(default_factory=frozenset)
    recovered: tuple[RecoveredBytes, ...] = ()
    times: LoadTimes | None = None
    transformed: Mapping[str, str] = field(default_factory=dict)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Keys of everything that was loaded."""
        return (*(a.key for a in self.arrays), *self.objects)

    @property
    def cast(self) -> tuple[ArrayReport, ...]:
        """Arrays whose values were converted to another dtype."""
        return tuple(a for a in self.arrays if a.is_cast)

    @property
    def padded(self) -> tuple[ArrayReport, ...]:
        """Arrays that are larger than what is stored."""
        return tuple(a for a in self.arrays if a.is_padded or a.kept_nbytes)

    @property
    def cut(self) -> tuple[ArrayReport, ...]:
        """Arrays that are smaller than what is stored."""
        return tuple(a for a in self.arrays if a.is_cut)

    @property
    def resharded(self) -> tuple[ArrayReport, ...]:
        """Arrays that were stored in other chunks than this rank requested."""
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
        for how, count in sorted(Counter(self.transformed.values()).items()):
            lines.append(f"transformed: {count} arrays, {how}")
        for name in ("missing", "unexpected", "excluded"):
            keys: frozenset[str] = getattr(self, name)
            if keys:
                lines += [f"{name}: {len(keys)}", truncated_list(sorted(keys))]
        if self.recovered:
            lines += [f"recovered: {len(self.recovered)}", truncated_list([str(r) for r in self.recovered])]
        return "\n".join(lines)


def _difference(array: ArrayReport) -> str:
    stored, requested = f"{array.stored_dtype} {array.stored_shape}", f"{array.dtype} {array.global_shape}"
    padding = f", {array.padded_nbytes:,} bytes of 0" if array.padded_nbytes else ""
    kept = f", {array.kept_nbytes:,} bytes kept" if array.kept_nbytes else ""
    return f"{array.key!r}: stored as {stored}, loaded as {requested}{padding}{kept}"


# The records of bytes that a load has read from another source, joined for the load report.

PARITY = "parity"
"""`RecoveredBytes.source` of bytes that were computed from parity. For a copy it is the copy's location."""


def merge_recovered(records: Iterable[RecoveredBytes]) -> tuple[RecoveredBytes, ...]:
    """Sort records, and join ranges of one chunk and source that follow each other.

    >>> parts = [RecoveredBytes(source="parity", why="", file="f", start=a, stop=a + 4) for a in (4, 0, 12)]
    >>> [(r.start, r.stop) for r in merge_recovered(parts)]
    [(0, 8), (12, 16)]
    """
    joined: list[RecoveredBytes] = []
    # Sorted, so that a range comes right after the one that it may continue.
    for record in sorted(records, key=lambda r: (r.file, r.start or 0, r.key or "", r.source)):
        if joined and joined[-1].is_continued_by(record):
            joined[-1] = replace(joined[-1], stop=max(joined[-1].stop or 0, record.stop or 0))
        else:
            joined.append(record)
    return tuple(joined)
