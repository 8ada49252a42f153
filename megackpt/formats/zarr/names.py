"""Names of the files of zarr checkpoints: from keys to names and back, and which keys can have a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from megackpt.errors import DeclarationError
from megackpt.plans.metadata import ArraySpec

BACKEND = "zarr"
COMMON = "common.pt"
STAGING = ".megackpt-"
"""Version 1, as earlier versions of megackpt saved it: begin of the names of markers, and of directories of
attempts that were not published."""

_MARKER = re.compile(r"\.megackpt-([0-9a-f]{16})\.json")
_SHARD = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)\.(?:pt|bin)")
# What no file system or zarr v3 (which reserves "__") takes, and "%", so that `unquoted` is the inverse.
_UNSAFE = re.compile(r"[%/\\\x00-\x1f\x7f]|^\.+$|^__|^zarr\.json$", re.DOTALL)


def marker(attempt: str) -> str:
    """Return the file that lists the files of an attempt of version 1, saved by an earlier megackpt."""
    return f"{STAGING}{attempt}.json"


def attempt_of_marker(name: str) -> str | None:
    """Return the attempt in the name of a marker."""
    match = _MARKER.fullmatch(name)
    return match.group(1) if match else None


def arrays_directory(attempt: str) -> str:
    """Return the zarr group of an attempt of version 3."""
    return f"zarr-{attempt}/"


def objects_directory(attempt: str) -> str:
    """Return the directory with the objects of an attempt of version 3."""
    return f"objects-{attempt}/"


def common_file(attempt: str) -> str:
    """Return the file with the common state of an attempt of version 3."""
    return f"common-{attempt}.safetensors"


def files_file(attempt: str) -> str:
    """Return the file that lists the files of an attempt of version 3."""
    return f"files-{attempt}.json"


def shard_file(offset: Sequence[int], shape: Sequence[int], *, suffix: str) -> str:
    """Return the name of the file of one object of an array of objects.

    Source: Megatron-Core `ShardedObject.unique_key`.

    >>> shard_file((0, 1), (2, 2), suffix=".pt")
    'shard_0.1_2.2.pt'
    """
    return f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}{suffix}"


def parse_shard(leaf: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return offset and shape from the name of an object's file; None for any other name.

    >>> parse_shard("shard_0.1_2.2.pt")
    ((0, 1), (2, 2))
    """
    match = _SHARD.fullmatch(leaf)
    if not match:
        return None
    offset, shape = (tuple(int(n) for n in part.split(".")) for part in match.groups())
    return offset, shape


def quoted(key: str) -> str:
    """Return a directory name for any key: what a name cannot hold is percent-encoded.

    >>> quoted("layer/weight"), quoted(".."), quoted("layer.0.weight")
    ('layer%2Fweight', '%2E%2E', 'layer.0.weight')
    """
    # A match may have several characters, such as those of `..`; each one is encoded.
    return _UNSAFE.sub(lambda m: "".join(f"%{byte:02X}" for byte in m.group().encode()), key)


def unquoted(name: str) -> str:
    """Return the key of a directory name."""
    return unquote(name)


def check_lengths(arrays: Iterable[ArraySpec]) -> None:
    """Check that directory names of keys are valid in a file system.

    Raises:
        DeclarationError: an encoded key is empty, or longer than 255 bytes.
    """
    for spec in arrays:
        if not 0 < len(quoted(spec.key).encode(errors="replace")) < 256 or not is_unicode(spec.key):
            raise DeclarationError(
                f"{spec.key[:80]!r}: format zarr version 3 makes a directory name of the key, which is "
                f"empty, longer than 255 bytes, or no valid Unicode. Use another key, or "
                f"save in the native format, which takes any.",
                key=spec.key,
            )


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text: halves of characters cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
