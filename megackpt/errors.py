"""Every error megackpt raises on purpose.

Owns the error tree and nothing else; each layer raises from here.

    CheckpointError (also spelled CheckpointingException, Megatron-Core's name)
    |- GeometryError          ValueError         a box, split or flat range that cannot exist
    |- DeclarationError       ValueError         an entity or state dict that contradicts itself
    |- CoverageError          ValueError         an element saved by no rank, or by two
    |- MismatchError          ValueError         ranks, or the request and the checkpoint, disagree
    |  `- CommonStateError    ValueError         ranks disagree about what is not sharded
    |- MissingKeyError        KeyError           asked for, and not in the checkpoint
    |- UnserializableError    TypeError          a value without a codec, named by its path in the state dict
    |- NotACheckpointError    FileNotFoundError  no committed checkpoint at this path
    |- FormatError            ValueError         a file that is not what the format says
    |  `- UnknownClassError   ValueError         a stored value of a class that this process does not know
    |- IntegrityError         ValueError         stored bytes whose digest differs
    |- StorageError           OSError            the file system or object store refused
    |- OptimizerError         RuntimeError       an optimizer that cannot be sharded, or steps out of order
    |- UnsupportedError       NotImplementedError  a name of another library that is not offered here
    |- MissingExtraError      ImportError        an optional dependency is not installed
    `- RankFailedError        RuntimeError       another rank failed, or did not answer before the deadline
       `- WriterFailedError   RuntimeError       a process that writes asynchronous saves; all ranks are well
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


class CheckpointError(Exception):
    """Base of all errors of megackpt.

    Attributes:
        key: the global array or object concerned, if there is one.
        rank: the rank that found or caused it, if known.
        path: the file, directory or state-dict path concerned, if there is one.
    """

    def __init__(
        self, message: str, *, key: str | None = None, rank: int | None = None, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.rank = rank
        self.path = path

    def __str__(self) -> str:
        # KeyError would print the repr of its argument; every error of ours prints its text.
        return self.message


CheckpointingException = CheckpointError


class GeometryError(CheckpointError, ValueError):
    """A box, split or flat range that cannot exist."""


class DeclarationError(CheckpointError, ValueError):
    """A sharded entity, layout or state dict that contradicts itself."""


class CoverageError(CheckpointError, ValueError):
    """An element of a global array that no main replica covers, or more than one."""


class MismatchError(CheckpointError, ValueError):
    """Two ranks, or the request and the checkpoint, disagree about shape, dtype or content."""


class CommonStateError(MismatchError):
    """Ranks disagree about common state, of which rank 0's is stored; `path` is one of the places."""


class MissingKeyError(CheckpointError, KeyError):
    """A key was asked for that the checkpoint does not hold."""


class UnserializableError(CheckpointError, TypeError):
    """A value without a codec; `path` is where it stands in the state dict."""


class NotACheckpointError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class FormatError(CheckpointError, ValueError):
    """A file of a checkpoint is not what the format says."""


class UnknownClassError(FormatError):
    """A stored value is of a class that this process does not know, or may not load; it may be whole."""


class IntegrityError(CheckpointError, ValueError):
    """Stored bytes do not have the digest they were stored with."""


class StorageError(CheckpointError, OSError):
    """The file system or object store refused an operation."""


class OptimizerError(CheckpointError, RuntimeError):
    """An inner optimizer whose state cannot be sharded, or calls in an order that loses data."""


class UnsupportedError(CheckpointError, NotImplementedError):
    """What another library does under this name is not offered; the text says what to use instead."""


class MissingExtraError(CheckpointError, ImportError):
    """Something needs an optional dependency that is not installed; the text names the extra."""


class RankFailedError(CheckpointError, RuntimeError):
    """Another rank failed, or did not answer before the deadline."""


class WriterFailedError(RankFailedError):
    """A process that writes an asynchronous save died, hung or lost the others; the ranks themselves live."""


def truncated_list(lines: list[str], *, limit: int = 10, total: int | None = None) -> str:
    """Join the first `limit` lines, indented, and say how many were left out.

    total is how many there are where `lines` holds the first ones only.
    """
    shown = [f"  {line}" for line in lines[:limit]]
    total = len(lines) if total is None else total
    if total > len(shown):
        shown.append(f"  ... and {total - len(shown)} more ({total} in all)")
    return "\n".join(shown)


def rank_list(ranks: Iterable[int], *, limit: int = 8) -> str:
    """Join ranks, ascending; many of them as ranges, so that the few that are missing can be seen.

    >>> rank_list([4, 2]), rank_list(rank for rank in range(64) if rank != 17)
    ('2, 4', '0-16, 18-63 (63 in all)')
    """
    found = sorted(set(ranks))
    if len(found) <= limit:
        return ", ".join(map(str, found))
    starts = [at for at, rank in enumerate(found) if at == 0 or found[at - 1] != rank - 1]
    runs = [found[a:b] for a, b in pairwise([*starts, len(found)])]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:limit]]
    return f"{', '.join(shown)}{', ...' if len(runs) > limit else ''} ({len(found)} in all)"
