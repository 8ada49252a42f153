"""The request of a load, and the source of its bytes.

Bytes come from the checkpoint itself, or from replacements of damaged bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from megackpt.comm import AnyGroup
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.entities import ShardedStateDict
from megackpt.errors import truncated_list
from megackpt.formats.contents import Contents
from megackpt.ground.notices import notice
from megackpt.options import LoadOptions
from megackpt.plans.validation import StrictHandling
from megackpt.storage import Store

if TYPE_CHECKING:
    from megackpt.engine.loading.fallback import FallbackSource
    from megackpt.maps import MapChoice
    from megackpt.plans.validation import RecoveredBytes


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The arguments of a load.

    Attributes:
        state: the sharded state dict to fill.
        open_store: returns the store of the checkpoint, open until the load ends. A rank may fail in it.
        options: options of the load.
        strict: the mode for missing and unexpected keys.
        exchange_group: ranks that read for each other, this one among them; None for all.
        file_readers: ranks that can read a file of chunks, ascending, by its name; None if all ranks can read
            all files.
        maps: the map to the names of the checkpoint, or what it is made by; None if it has the names of the
            request.
        config: the config of the other model; None for that of the checkpoint.
    """

    state: ShardedStateDict
    open_store: Callable[[], AbstractContextManager[Store]]
    options: LoadOptions
    strict: StrictHandling | str
    exchange_group: AnyGroup | None = None
    file_readers: Mapping[str, Sequence[int]] | None = None
    maps: MapChoice | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A checkpoint whose bytes all come from one store; damaged bytes are an error.

    Attributes:
        location: path or URL of the checkpoint.
        contents: the opened checkpoint.
        only_store: the store.
        recovered: nothing, since there is no other source.
    """

    location: str
    contents: Contents
    only_store: Store
    recovered: tuple[RecoveredBytes, ...] = ()


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
    if contents.left_out:
        lines = truncated_list(list(contents.left_out))
        notice(log, f"{store.location}: some of it can be loaded by no key, and is left out:\n{lines}")
    return StoreSource(store.location, contents, store)
