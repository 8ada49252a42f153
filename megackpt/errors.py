"""The error classes of megackpt; `megackpt` exports those that programs catch most.

CheckpointError (CheckpointingException, Megatron-Core's name, is the same class)
|- GeometryError          ValueError         a box, split or flat range is impossible
|- DeclarationError       ValueError         an entity, state dict or argument contradicts itself
|- CoverageError          ValueError         an element is saved by no rank, or by two
|- MismatchError          ValueError         ranks, or the request and the checkpoint, differ
|  `- CommonStateError    ValueError         ranks have different common state
|- MissingKeyError        KeyError           a requested key is not in the checkpoint
|- UnserializableError    TypeError          a value has no codec; the text has its path
|- NotACheckpointError    FileNotFoundError  there is no committed checkpoint at this path
|- FormatError            ValueError         a file does not have the form that its format requires
|  `- UnknownClassError   ValueError         a stored value has a class that this process does not know
|- IntegrityError         ValueError         stored bytes do not have their digest
|- StorageError           OSError            the file system or object store raised an error
|- OptimizerError         RuntimeError       an optimizer cannot be sharded, or the order of calls is wrong
|- MapError               ValueError         a map between families of names is wrong, or does not fit
|- UnsupportedError       NotImplementedError  a format, a store or megackpt does not support a feature
|- MissingExtraError      ImportError        an optional dependency is not installed
`- RankFailedError        RuntimeError       another rank failed, or did not answer before the deadline
   `- WriterFailedError   RuntimeError       a process that writes asynchronous saves failed; no rank did
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

__all__ = [
    "CheckpointError",
    "CheckpointingException",
    "CommonStateError",
    "CoverageError",
    "DeclarationError",
    "FormatError",
    "GeometryError",
    "IntegrityError",
    "MapError",
    "MismatchError",
    "MissingExtraError",
    "MissingKeyError",
    "NotACheckpointError",
    "OptimizerError",
    "RankFailedError",
    "StorageError",
    "UnknownClassError",
    "UnserializableError",
    "UnsupportedError",
    "WriterFailedError",
]


class CheckpointError(Exception):
    """Base class of all errors of megackpt.

    Attributes:
        key: the key of the array or object, if the error is about one.
        rank: the rank that found or caused the error, if it is known.
        path: the file, directory or state-dict path, if the error is about one.
    """

    def __init__(
        self, message: str, *, key: str | None = None, rank: int | None = None, path: str | None = None
    ) -> None:
        message = _within_a_screen(message)
        super().__init__(message)
        self.message = message
        self.key = key
        self.rank = rank
        self.path = path

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; every error here prints its text.
        return self.message


CheckpointingException = CheckpointError


class GeometryError(CheckpointError, ValueError):
    """A box, split or flat range is impossible.

    Correct the numbers. If they come from megackpt's own code, report it.
    """


class DeclarationError(CheckpointError, ValueError):
    """A sharded entity, layout, state dict or argument contradicts itself, or another argument.

    Correct what the text names. Ranks also compare their arguments before a save or load begins, and all
    raise this error if these differ: give all ranks the same path, step, deadlines and options. Only these
    may differ: `Tiers.node`, `staging_bytes`, `part_bytes`, `threads`, `exchange_bytes`, `nice`, `verify`,
    `on_corrupt`, `exclude`, and the location of a `Store` that each rank makes for itself.
    """


class CoverageError(CheckpointError, ValueError):
    """An element of a global array has no main replica, or more than one.

    A save raises it before anything is written, a load with `LoadOptions(complete=True)` before anything is
    read. Correct offsets and replica ids as the text says. Often a layer has no `tp_sharding`, so every rank
    declares all of a parameter.
    """


class MismatchError(CheckpointError, ValueError):
    """Two ranks, or the request and the checkpoint, differ in shape, dtype or content.

    A value is never cast, padded or cut without being asked to. Make both sides equal, or allow the
    difference: docs/loading.md#rules-for-groups-of-keys. Ranks differ if they declare an array in different
    ways, or have different bits in copies of one chunk: `tp_sharding` is missing, or copies have drifted
    apart (docs/operating.md#samples-of-replicas). Then nothing was written. For random states and schedules
    at another layout, see docs/training-state.md.
    """


class CommonStateError(MismatchError):
    """Ranks have different common state, but only rank 0's is stored; `path` is one that differs.

    Nothing was written. If each rank has its own value, make it a `PerRankValue`. For the buffers of a
    BatchNorm, see docs/torch.md#buffers-that-differ-between-ranks.
    """


class MissingKeyError(CheckpointError, KeyError):
    """A requested key is not in the checkpoint.

    Nothing was read. Ask for keys that were saved, which the text shows, or choose what an unexpected key
    means: docs/loading.md#keys-that-only-one-side-has. A `ShardedObject` exists only at the saved
    offsets: after a change of layout ask for other ones, or leave it out.
    """


class UnserializableError(CheckpointError, TypeError):
    """A value has no codec; `path` is its path in the state dict.

    Nothing was written. Save plain values, or give the class a codec with `megackpt.register_codec`.
    """


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path.

    Either nothing was saved there, or the save did not finish. Name the directory of one checkpoint, such as
    `run/iter_0000100`, or give its root to a `Checkpointer`.
    """


class FormatError(CheckpointError, ValueError):
    """A file of a checkpoint does not have the form that its format requires.

    If the version is newer than those that the text names, update megackpt. If a file is damaged, repair it
    (docs/operating.md#repair), copy the checkpoint again, or load another one.
    """


class UnknownClassError(FormatError):
    """A stored value has a class that this process does not know, or may not load; it may be undamaged.

    Import the module that registers the class, or register it. In formats with pickles, if you trust the
    writer, allow the class with `torch.serialization.add_safe_globals`, or load with
    `LoadOptions(allow_unsafe_pickle=True)`: docs/security.md#unknown-classes.
    """


class IntegrityError(CheckpointError, ValueError):
    """Stored bytes do not have the digest that was stored with them.

    A disk, a copy or a person changed them. Repair the file (docs/operating.md#repair), take the bytes from
    parity files or copies with `LoadOptions(on_corrupt="fallback")`, or load another checkpoint. Check the
    disk, too. `LoadOptions(verify=False)` loads what is left; then nothing shows which numbers are wrong.
    After `Checkpointer(verify_after_save=True)` the damaged step is removed, and older ones stay.
    """


class StorageError(CheckpointError, OSError):
    """The file system or object store raised an error, or a name could lead out of the checkpoint.

    `errno` is that of the system, if it gave one. The text has its message and the usual cause: a full disk
    (with the needed and the free bytes), a permission, a read-only file system, a symbolic link. With
    `Checkpointer(on_error="warn")` a save only warns: docs/checkpointer.md#when-a-save-fails.
    """


class OptimizerError(CheckpointError, RuntimeError):
    """The state of an inner optimizer cannot be sharded, or the order of calls loses data.

    Use the wrapper that the text names: docs/optimizers.md says which optimizers each one takes.
    """


class MapError(CheckpointError, ValueError):
    """A map between two families of names is wrong, or does not fit the arrays of a checkpoint.

    It is raised before anything is read or written. Give the `config.json` of this very model, or correct
    the rules of your own family: docs/huggingface.md#maps-and-families.
    """


class UnsupportedError(CheckpointError, NotImplementedError):
    """A format, a store or megackpt does not support a feature; the text says what to use instead.

    Examples are parity in another format than the native one, a repair in a store that cannot replace files
    at once, and names of Megatron-Core that docs/megatron-compat.md lists.
    """


class MissingExtraError(CheckpointError, ImportError):
    """An optional dependency is not installed; the text names the extra.

    Nothing was read or written. Install it: `pip install 'megackpt[zarr]'`.
    """


class RankFailedError(CheckpointError, RuntimeError):
    """Another rank failed, or did not answer before the deadline.

    Look at the log of the rank that the text names; there the first error is the `__cause__` of this one. If
    it was only slow, raise `timeout_s`. A group of torch.distributed that has lost a rank does not recover:
    restart the job. If rank 0 or the launcher is gone, the text names the rendezvous store.
    """


class WriterFailedError(RankFailedError):
    """A process that writes an asynchronous save died, hung or lost the others; no rank failed.

    The next call raises it, and the next save starts another process. Look at the log of the rank, at the
    memory of its machine, and at the disk or mount. Raise `timeout_s` if that is only slow. If ports between
    nodes are closed, open them: docs/checkpointer.md#asynchronous-saves-into-tiers.
    """


_MOST_CHARACTERS = 2400
"""Of the text of an error: a screen. Keys, and lists of them, may be of any length."""


def _within_a_screen(text: str) -> str:
    """Return a text without the middle of what is too long: it begins with what, and ends with how to fix it.

    Middles of long lines go first, such as of keys, and then the middle of the text.
    """
    if len(text) <= _MOST_CHARACTERS:
        return text
    lines = [_without_middle(line, _MOST_CHARACTERS // 2) for line in text.split("\n")]
    return _without_middle("\n".join(lines), _MOST_CHARACTERS)


def _without_middle(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2 - 20  # there is room for the note between the halves
    return f"{text[:half]} ... [{len(text) - 2 * half:,} characters] ... {text[-half:]}"


_LINES_SHOWN = 10
_LINE_CHARACTERS = 300
_RANGES_SHOWN = 8


def truncated_list(lines: list[str], *, total: int | None = None) -> str:
    """Join the first ten lines, indented, and append the number of lines that are left out.

    total is the number of all lines, if `lines` has only the first ones.
    """
    shown = [f"  {_without_middle(line, _LINE_CHARACTERS)}" for line in lines[:_LINES_SHOWN]]
    total = len(lines) if total is None else total
    if total > len(shown):
        shown.append(f"  ... and {total - len(shown)} more ({total} in all)")
    return "\n".join(shown)


def rank_list(ranks: Iterable[int]) -> str:
    """Join ranks, ascending. Many ranks are joined as ranges, so that gaps can be seen.

    >>> rank_list([4, 2]), rank_list(rank for rank in range(64) if rank != 17)
    ('2, 4', '0-16, 18-63 (63 in all)')
    """
    ordered = sorted(set(ranks))
    if len(ordered) <= _RANGES_SHOWN:
        return ", ".join(map(str, ordered))
    starts = [i for i, rank in enumerate(ordered) if i == 0 or ordered[i - 1] != rank - 1]
    ranges = [ordered[a:b] for a, b in pairwise([*starts, len(ordered)])]
    shown = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ranges[:_RANGES_SHOWN]]
    return f"{', '.join(shown)}{', ...' if len(ranges) > _RANGES_SHOWN else ''} ({len(ordered)} in all)"
