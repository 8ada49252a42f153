"""A store some of whose bytes come from another one: how it would be if they were replaced.

Owns which byte comes from where. Nothing is copied, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megackpt.storage.error_translation import ends_early
from megackpt.storage.store import Store, check_name
from megackpt.storage.views import ReadOnlyView


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """What takes the place of a file.

    Attributes:
        nbytes: how long it is.
        source: where bytes come from.
        name: the file there; each byte at its own position.
        ranges: which bytes come from there, half-open, ascending, without overlap; those between them, which
            the file itself has, stay.
    """

    nbytes: int
    source: Store
    name: str
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ends = [0, *(at for pair in self.ranges for at in pair), self.nbytes]
        if ends != sorted(ends):
            raise ValueError(
                f"{self.name}: ranges {self.ranges} are not in order within {self.nbytes} bytes."
            )

    @classmethod
    def whole(cls, source: Store, name: str, nbytes: int) -> Patch:
        """Return what takes the place of all of a file."""
        return cls(nbytes=nbytes, source=source, name=name, ranges=((0, nbytes),))


class PatchedStore(ReadOnlyView):
    """A view of a store with patches over some of its files, which need not be there."""

    def __init__(self, store: Store, patches: Mapping[str, Patch]) -> None:
        super().__init__(store)
        self._patches = dict(patches)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of all files, patched ones among them."""
        patched = (name for name in self._patches if name.startswith(prefix))
        return sorted({*super().names(prefix), *patched})

    def exists(self, name: str) -> bool:
        """Tell whether there is such a file."""
        check_name(name, location=self.location)
        return name in self._patches or super().exists(name)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return self._patches[name].nbytes if name in self._patches else super().size(name)

    def read_into(self, name: str, offset_bytes: int, out: memoryview) -> None:
        """Fill `out` from `offset_bytes` on, from here and there."""
        patch = self._patches.get(name)
        if patch is None or not out.nbytes:
            super().read_into(name, offset_bytes, out)
            return
        view = out.cast("B")
        if offset_bytes + len(view) > patch.nbytes:
            raise ends_early(f"{self.location}/{name}", patch.nbytes, offset_bytes, len(view))
        for start, stop, is_patched in _pieces(patch, offset_bytes, offset_bytes + len(view)):
            part = view[start - offset_bytes : stop - offset_bytes]
            if is_patched:
                patch.source.read_into(patch.name, start, part)
            else:
                super().read_into(name, start, part)


def _pieces(patch: Patch, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a range where the source of its bytes changes."""
    at = start
    for low, high in patch.ranges:
        low, high = max(low, at), min(high, stop)
        if low >= high:
            continue
        if at < low:
            yield at, low, False
        yield low, high, True
        at = high
    if at < stop:
        yield at, stop, False
