"""integrity.json: the SHA-256 of every file of a checkpoint, as Megatron-Core has it from 0.17 on.

Megackpt's own formats have a digest of every block anyway, which `load` checks as it reads. This file is for
programs that ask for it by `verify_integrity`, and for Megatron-Core, which can check ours with it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any

from megackpt.comm import Group, rank_0_errors_on_all_ranks, world_group
from megackpt.errors import CheckpointError, FormatError, IntegrityError
from megackpt.formats.documents import parse_document
from megackpt.storage import Store, opened_store

logger = logging.getLogger(__name__)

INTEGRITY_FNAME = "integrity.json"
_ALGORITHM = "sha256"
_READ_BYTES = 1 << 20
_MAX_BYTES = 64 << 20
_TIMEOUT_S = 3600.0  # rank 0 reads the whole checkpoint meanwhile


def save_integrity_manifest(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Hash every file of a checkpoint and write integrity.json. Local: one process calls it."""
    with opened_store(checkpoint_dir) as store:
        names = sorted(name for name in store.names() if name != INTEGRITY_FNAME)
        files = {name: _sha256(store, name) for name in names}
        text = json.dumps({"algorithm": _ALGORITHM, "files": files}, indent=2)
        store.replace(INTEGRITY_FNAME, text.encode())
        store.sync()
    logger.info("Wrote %s of %d files in %s", INTEGRITY_FNAME, len(files), checkpoint_dir)


def verify_integrity_manifest(checkpoint_dir: str | os.PathLike[str], group: Group | None = None) -> None:
    """Compare every file that integrity.json names with its hash. Collective: rank 0 reads the files.

    Raises:
        IntegrityError: there is no integrity.json, or a file is missing or has other bytes; on every rank.
        FormatError: integrity.json is damaged.
    """
    ranks = world_group(timeout_s=_TIMEOUT_S) if group is None else group
    with rank_0_errors_on_all_ranks(ranks, f"verifying {INTEGRITY_FNAME}"):
        if ranks.rank == 0:
            _verify(checkpoint_dir)


def write_on_rank_0(checkpoint_dir: str | os.PathLike[str], group: Group | None = None) -> None:
    """Write integrity.json of a committed checkpoint on rank 0; all ranks wait. Collective."""
    ranks = world_group(timeout_s=_TIMEOUT_S) if group is None else group
    with rank_0_errors_on_all_ranks(ranks, f"writing {INTEGRITY_FNAME}"):
        if ranks.rank == 0:
            save_integrity_manifest(checkpoint_dir)


def _verify(checkpoint_dir: str | os.PathLike[str]) -> None:
    with opened_store(checkpoint_dir) as store:
        files = _listed(store, checkpoint_dir)
        wrong = [f"{name}: {why}" for name, digest in files.items() if (why := _fault(store, name, digest))]
    if wrong:
        raise IntegrityError(
            f"{checkpoint_dir}: {len(wrong)} of {len(files)} files differ from {INTEGRITY_FNAME}: "
            f"{'; '.join(wrong[:8])}. Load another checkpoint, or leave verify_integrity out to read what is "
            f"whole. A later save into this directory without verify_integrity leaves the file of the "
            f"earlier one: then save again with it.",
            path=str(checkpoint_dir),
        )


def _listed(store: Store, checkpoint_dir: str | os.PathLike[str]) -> dict[str, str]:
    if not store.exists(INTEGRITY_FNAME):
        raise IntegrityError(
            f"{checkpoint_dir} has no {INTEGRITY_FNAME}, so verify_integrity has nothing to compare with. "
            f"Save with verify_integrity=True, or load without it: megackpt checks the digest of every block "
            f"that it reads.",
            path=str(checkpoint_dir),
        )
    stored: Any = parse_document(store.read(INTEGRITY_FNAME, max_bytes=_MAX_BYTES), where=INTEGRITY_FNAME)
    files = stored.get("files")
    if stored.get("algorithm", _ALGORITHM) != _ALGORITHM or not isinstance(files, dict):
        raise FormatError(
            f"{checkpoint_dir}/{INTEGRITY_FNAME} does not list files with their SHA-256. It is damaged, or "
            f"of a version that is not known here.",
            path=str(checkpoint_dir),
        )
    return files


def _fault(store: Store, name: str, digest: str) -> str:
    """Return how a file differs from its hash; an empty text where it does not."""
    try:
        actual = _sha256(store, name)
    except (CheckpointError, OSError) as error:
        return f"it cannot be read ({error})"
    return "" if actual == digest else f"its SHA-256 is {actual[:16]}..., not {str(digest)[:16]}..."


def _sha256(store: Store, name: str) -> str:
    hashed, size = hashlib.sha256(), store.size(name)
    buffer = memoryview(bytearray(min(_READ_BYTES, max(size, 1))))
    for start in range(0, size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, size - start)]
        store.read_into(name, start, part)
        hashed.update(part)
    return hashed.hexdigest()
