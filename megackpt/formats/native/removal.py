"""Removes arrays from a native checkpoint, by a new index without them."""

from __future__ import annotations

from megackpt.formats.index_file import read_index, without_arrays, write_index
from megackpt.formats.native import names
from megackpt.formats.native.parity import reduced_parity
from megackpt.formats.strategy import Json
from megackpt.storage import Store


def remove_arrays(store: Store, manifest: Json, *, key_prefix: str) -> tuple[Json, list[str]]:
    """Write a new index without some arrays; data files that hold nothing else become stale.

    Data files that parity needs to compute others are kept. Returns what `SaveStrategy.remove_arrays` does.
    """
    index = read_index(store, manifest)
    stored = without_arrays(index, key_prefix=key_prefix)
    old = manifest["index"]["file"]
    # A new name: the committed index stays as it is until a manifest that names the new one replaces the
    # old.
    new = names.index_file(manifest["attempt"], revision=names.revision_of(old) + 1)
    kept = frozenset(stored.files)
    stale = set(index.files) - kept
    entries = {**manifest, "index": write_index(store, new, stored)}
    if "parity" in manifest:
        parity, needed, unneeded = reduced_parity(store, manifest, kept)
        del entries["parity"]
        entries |= parity
        stale = (stale - needed) | unneeded
    return entries, [old, *sorted(stale)]
