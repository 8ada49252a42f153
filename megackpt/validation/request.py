"""Proof that a request can be answered: every key is there, with the shape and dtype asked for.

Owns the comparison of one rank's declarations with a checkpoint's arrays, before any byte is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from megackpt.errors import MismatchError, MissingKeyError, truncated_list
from megackpt.metadata import ArraySpec, DeclaredChunks


def check_request(requested: DeclaredChunks, stored: Mapping[str, ArraySpec], *, where: str) -> None:
    """Check every array of a request against those in the checkpoint.

    Raises:
        MissingKeyError: keys that the checkpoint lacks, each with the most similar one it has.
        MismatchError: arrays stored with another dtype or, unless they may be resized, global shape.
    """
    resizable = {int(a) for a in requested.table.array[requested.resizable]}
    absent = [a.key for a in requested.table.arrays if a.key not in stored]
    if absent:
        raise _missing(absent, stored, where)
    lines: list[str] = []
    first: str | None = None
    for number, asked in enumerate(requested.table.arrays):
        found = stored[asked.key]
        same_shape = asked.global_shape == found.global_shape
        may_resize = number in resizable and len(asked.global_shape) == len(found.global_shape)
        if asked.dtype == found.dtype and (same_shape or may_resize):
            continue
        first = first or asked.key
        lines.append(
            f"{asked.key!r}: stored as {found.dtype} {found.global_shape}, asked for as {asked.dtype} "
            f"{asked.global_shape}"
        )
    if lines:
        raise MismatchError(
            f"{where} holds other shapes or dtypes than asked for:\n{truncated_list(lines)}\n"
            f"Build the model with the sizes it was saved with; set allow_shape_mismatch=True on a tensor "
            f"whose global "
            f"shape may differ (a padded vocabulary); load into the stored dtype and cast afterwards.",
            key=first,
            path=where,
        )


def _missing(absent: list[str], stored: Mapping[str, ArraySpec], where: str) -> MissingKeyError:
    lines: list[str] = []
    for key in absent:
        close = difflib.get_close_matches(key, stored, n=1) if len(lines) < 10 else []
        lines.append(repr(key) + (f" (the checkpoint has {close[0]!r})" if close else ""))
    return MissingKeyError(
        f"{where} does not hold {len(absent)} of the keys asked for:\n{truncated_list(lines)}\n"
        f"Ask for what was saved, or list what is there with megackpt.load_sharded_metadata().",
        key=absent[0],
        path=where,
    )
