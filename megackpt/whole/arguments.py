"""Arguments that the functions on whole checkpoints share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from megackpt.engine.data.progress import NoProgress, Progress
from megackpt.errors import DeclarationError
from megackpt.ground.arguments import check_texts


def checked_globs(globs: Sequence[str]) -> tuple[str, ...]:
    """Return globs of keys as a tuple.

    Raises:
        DeclarationError: the argument is a single text, or has other values than texts.
    """
    texts = tuple(globs) if isinstance(globs, list) else globs
    check_texts("keys", texts, example="('decoder.*',)")
    return tuple(texts)


def matching(keys: Iterable[str], globs: Sequence[str]) -> list[str]:
    """Return the keys that match one of some globs; all keys if there are no globs.

    >>> matching(["a.weight", "b.bias"], ["a.*"])
    ['a.weight']
    """
    return [key for key in keys if not globs or any(fnmatchcase(key, glob) for glob in globs)]


def checked_progress(progress: Progress | None) -> Progress:
    """Return an object that takes reports of progress; for None, an object that ignores them.

    Raises:
        DeclarationError: the object lacks a method.
    """
    if progress is None:
        return NoProgress()
    if not all(callable(getattr(progress, name, None)) for name in ("begin", "advance")):
        raise DeclarationError(
            f"progress is {progress!r}; give an object with the methods begin(doing, nbytes) and "
            f"advance(nbytes), or None."
        )
    return progress
