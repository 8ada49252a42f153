"""The hook that writes parity files, after all chunks and before the commit.

`formats.native.parity` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megackpt.comm import Group, gather_step, scatter_step
from megackpt.engine.saving.planned_save import SaveHook, WrittenChunks
from megackpt.errors import UnsupportedError
from megackpt.formats.strategy import Json, SaveStrategy
from megackpt.storage import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityHook(SaveHook):
    """Writes one parity file for each group of data files.

    Attributes:
        max_files: how many data files a group has at most.
    """

    max_files: int

    def strategy_for(self, strategy: SaveStrategy) -> SaveStrategy:
        """Return the strategy as it is, if its format has parity files."""
        if not strategy.capabilities.writes_parity:
            raise UnsupportedError(
                f"Format {strategy.backend} version {strategy.version} has no parity files. Save without "
                f"SaveOptions.parity, or in the native format."
            )
        return strategy

    def after_writing(
        self, written: WrittenChunks, store: Store, strategy: SaveStrategy, group: Group
    ) -> list[bytes]:
        """Compute the parity of the files that were written; rank 0 decides which rank computes what."""
        attempt = written.planned.attempt
        with scatter_step(group, "planning parity") as planning:
            if group.rank == 0:
                planning.parts = strategy.plan_parity(
                    attempt=attempt, plan=written.plan(), receipts=written.receipts, most=self.max_files
                )
        with gather_step(group, "writing parity files") as writing:
            writing.data = strategy.write_parity(store, attempt=attempt, work=planning.part)
        return writing.results

    def index_fields(
        self, receipts: list[bytes], store: Store, strategy: SaveStrategy, *, attempt: str
    ) -> Json:
        """Write the list of parity files, and return what the manifest says of it."""
        return strategy.list_parity(store, attempt=attempt, receipts=receipts)
