"""Where the bytes of a load come from: the checkpoint itself, or what can replace damaged bytes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.formats.contents import Contents
from megackpt.options import LoadOptions
from megackpt.storage import Store
from megackpt.validation import RecoveredBytes

if TYPE_CHECKING:
    from megackpt.engine.loading.fallback import FallbackSource


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A checkpoint whose bytes all come from one store; damaged bytes are an error.

    Attributes:
        location: path or URL of the checkpoint.
        contents: the opened checkpoint.
        only_store: the store.
    """

    location: str
    contents: Contents
    only_store: Store

    @property
    def recovered(self) -> tuple[RecoveredBytes, ...]:
        """Return nothing: there is no other source."""
        return ()


Source: TypeAlias = "StoreSource | FallbackSource"


def open_source(store: Store, options: LoadOptions, resources: ExitStack) -> Source:
    """Open a checkpoint as `LoadOptions.on_corrupt` says. Local.

    Args:
        store: where the checkpoint was saved.
        options: `on_corrupt` and `copies` choose the source.
        resources: closes the copies that are opened.

    Raises:
        CheckpointError: neither the checkpoint nor a copy can be opened.
    """
    if options.on_corrupt == "fallback":
        from megackpt.engine.loading.fallback import FallbackSource

        return FallbackSource.open(store, options, resources)
    contents = open_checkpoint(store, allow_unsafe_pickle=options.allow_unsafe_pickle)
    return StoreSource(store.location, contents, store)
