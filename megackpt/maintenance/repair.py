"""Repairing a checkpoint: what is damaged is taken from parity or from copies, proved right, and replaced.

Owns the order of the steps, whether anything is replaced, and what is said of it. Which files are mended from
where is found in `repair_search`; `replace_files` puts them in place so that a crash does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megackpt.engine.data.progress import Progress
from megackpt.errors import IntegrityError
from megackpt.formats.damage import Damage
from megackpt.maintenance.repair_search import RepairedFile, RepairSearch
from megackpt.maintenance.replace_files import replace_files
from megackpt.options import RepairOptions
from megackpt.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairReport:
    """What a repair has found and done.

    Attributes:
        location: the checkpoint.
        damages: what was wrong.
        files: what is mended: was replaced, or can be.
        remaining: what is wrong afterwards, or would be.
        refusals: why a source was of no use.
        is_done: whether files were replaced.
    """

    location: str
    damages: tuple[Damage, ...]
    files: tuple[RepairedFile, ...] = ()
    remaining: tuple[Damage, ...] = ()
    refusals: tuple[str, ...] = ()
    is_done: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong afterwards."""
        return not self.remaining


def repair_checkpoint(
    store: Store, copies: Sequence[Store], options: RepairOptions, progress: Progress
) -> RepairReport:
    """Mend what is wrong with a checkpoint, as far as parity and copies allow. Local; one process calls it.

    Every byte is read and verified: before, as it would be, and afterwards. A damaged file is written anew
    beside the old one, verified there, and then takes its place all at once; the commit comes last. Unless
    `options.partial` is set, nothing is changed if something cannot be mended. No save and no removal may be
    under way in the directory.

    Raises:
        NotACheckpointError: there is none.
        FormatError: it is of a format that is not known here.
        StorageError: the store refused; what was written beside the old files is removed.
    """
    search = RepairSearch(store, copies, options, progress)
    first = search.begin()
    if not first.damages:
        return RepairReport(location=store.location, damages=())
    last = search.mend(first)
    found = RepairReport(
        location=store.location,
        damages=first.damages,
        files=last.files,
        remaining=last.damages,
        refusals=tuple(dict.fromkeys(search.refusals)),
    )
    if options.dry_run or not last.files or (last.damages and not options.partial):
        return found
    expected = {damage.file for damage in last.damages}

    def check(written: Store) -> None:
        worse = [d for d in search.verify(written) if d.file not in expected]
        if worse:
            raise IntegrityError(
                f"What was written is not what it should be: {worse[0]}", path=store.location
            )

    replace_files(store, last.view, list(dict.fromkeys(file.file for file in last.files)), check)
    after = search.verify(store)
    return RepairReport(
        location=store.location,
        damages=first.damages,
        files=found.files,
        remaining=after,
        refusals=found.refusals,
        is_done=True,
    )
