"""A save that an AsyncRequest stands for: done at once when it is called, or by a writer process.

It keeps the arguments of the call until then. `async_utils` has the queue.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from megackpt.comm import Group
from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.prepared_save import Destination, for_a_writer
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.errors import CommonStateError
from megackpt.options import SaveOptions
from megackpt.storage import absolute_path, is_url

log = logging.getLogger(__name__)

MakesRequest: TypeAlias = Callable[[Group, SaveOptions, bool], SaveRequest]
"""Makes the request for a group; the last argument says whether common state may differ between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredSave:
    """One save of ours, not begun.

    The tensors are those of the model until it is: schedule or execute the request before training goes on.

    Attributes:
        now: saves, and returns when it is committed; collective.
        request: makes the request that a writer process is given.
        options: of the save.
        checkpoint_dir: where to.
    """

    now: Callable[[], None]
    request: MakesRequest
    options: SaveOptions
    checkpoint_dir: str

    def __call__(self) -> None:
        """Save, and return when it is committed. Collective."""
        self.now()

    def begin(self, saver: AsyncSaver, group: Group) -> None:
        """Plan and stage; the writer process of each rank writes and commits. Collective, after `may_save`.

        Where ranks disagree about common state, that of rank 0 is stored, as `save` does.

        Raises:
            CheckpointError: as `megackpt.save` before anything is written.
        """
        try:
            self._begin(saver, group, may_differ=False)
        except CommonStateError as error:  # before anything was staged, and on every rank
            if group.rank == 0:
                log.warning("%s Rank 0's is stored, as Megatron-Core does.", error)
            self._begin(saver, group, may_differ=True)

    def _begin(self, saver: AsyncSaver, group: Group, *, may_differ: bool) -> None:
        there = self.checkpoint_dir.rstrip("/")
        if not is_url(there):
            there = absolute_path(there)  # the process that writes has the working directory of its start
        root, name = os.path.split(there)
        destination = Destination(
            request=for_a_writer(self.request(group, self.options, may_differ)),
            location=CheckpointLocation(root=root, name=name),
            label=self.checkpoint_dir,
            on_commit=lambda _: None,  # that is done elsewhere
            on_failure=lambda _: False,
        )
        saver.save([destination], group, self.options)
