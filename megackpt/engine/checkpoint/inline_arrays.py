"""Tensors that common state holds by value, as arrays of the checkpoint: inline arrays.

Some tensors are stored in common state itself: those without dims or elements, all plain tensors in formats
that do not refer to arrays, and those of checkpoints that were saved before tensors became arrays. To a load
each is an array like any other, with its path as key. So options that speak of arrays reach it, and any
declaration may ask for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from megackpt.engine.checkpoint.common_arrays import common_leaves, is_name, with_references
from megackpt.engine.checkpoint.opening import read_common_and_references
from megackpt.entities.describe import dtype_name
from megackpt.entities.plain_tensors import is_dense
from megackpt.entities.tree import Steps, dotted, shown
from megackpt.errors import FormatError
from megackpt.formats.contents import MAX_REPEATED_BYTES, Chunks, Contents
from megackpt.plans.metadata import ArraySpec


def with_inline_arrays(contents: Contents, *, where: str) -> Contents:
    """Return contents whose common state refers to an array in the place of each of its dense tensors.

    The key of such an array is its path joined with dots. Where another array or tensor has that name, it is
    the path as it is written in Python, which no other can have.

    Args:
        contents: an opened checkpoint.
        where: its location, for errors.

    Raises:
        FormatError: the common state does not have the form in which a save writes it.
    """
    common, content = read_common_and_references(contents, where=where)
    tensors = {steps: leaf for steps, leaf in common_leaves(common) if is_dense(leaf)}
    counts = Counter(map(dotted, tensors))
    taken = contents.arrays.keys() | contents.unreadable.keys()

    def key_of(steps: Steps) -> str:
        name = dotted(steps)
        return name if counts[name] == 1 and name not in taken and is_name(steps) else shown(steps)

    keys = {steps: key_of(steps) for steps in tensors}
    inline = {keys[steps]: tensor for steps, tensor in tensors.items()}
    common = with_references(common, keys)
    specs = {key: ArraySpec(key, dtype_name(t.dtype), tuple(t.shape)) for key, t in inline.items()}
    return replace(
        contents,
        arrays={**contents.arrays, **specs} if inline else contents.arrays,
        common=lambda: {"state_dict": common, "content_metadata": content},
        inline=inline,
    )


def inline_chunks(contents: Contents, keys: Iterable[str], *, where: str) -> Chunks:
    """Return inline arrays as chunks, each whole. Local.

    Args:
        contents: with inline arrays.
        keys: of inline arrays.
        where: the location of the checkpoint, for errors.
    """
    from megackpt.formats.foreign.state import ForeignArray
    from megackpt.formats.foreign.strategy import TensorChunks

    arrays = [ForeignArray.whole(key, contents.inline[key]) for key in sorted(set(keys))]
    return TensorChunks(list(enumerate(arrays)), where=where)


def check_repeated(contents: Contents, *, where: str) -> None:
    """Check that whole copies of the inline arrays need little more memory than common state has of them.

    Raises:
        FormatError: a tensor repeats its elements (`expand`) too often.
    """
    repeated = 0
    for key, tensor in contents.inline.items():
        nbytes = tensor.numel() * tensor.element_size()
        repeated += max(0, nbytes - tensor.untyped_storage().nbytes())
        if repeated > MAX_REPEATED_BYTES:
            raise FormatError(
                f"{where}: {key!r} is an expanded tensor that would need {nbytes:,} bytes, or the file is "
                f"damaged. Load it into a tensor of its shape, or save tensor.contiguous().",
                key=key,
                path=where,
            )
