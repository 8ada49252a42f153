"""A save that an AsyncRequest stands for: done at once when it is called, or by a writer process.

It keeps the arguments of the call until then. `async_utils` has the queue.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeAlias

from megackpt.comm import Group
from megackpt.contrib.megatron.errors import naming_install
from megackpt.engine.background.messages import CheckpointLocation
from megackpt.engine.background.prepared_save import Destination
from megackpt.engine.background.saver import AsyncSaver
from megackpt.engine.saving.save_request import SaveRequest
from megackpt.entities import StateDict
from megackpt.errors import CommonStateError
from megackpt.options import SaveOptions
from megackpt.storage import absolute_path, is_url

log = logging.getLogger(__name__)

MakesRequest: TypeAlias = Callable[[bool], SaveRequest]
"""Makes the request. The argument says whether common state may differ between ranks."""


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
        with naming_install():
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
            request=self.request(may_differ),
            location=CheckpointLocation(root=root, name=name),
            label=self.checkpoint_dir,
            on_commit=lambda _: None,  # that is done elsewhere
            on_failure=lambda _: False,
        )
        saver.save([destination], group, self.options)


# A save of megackpt inside the save of a user's strategy.
#
# A strategy may pass its arguments on to one of megackpt's, as a wrapper does. The inner strategy then saves
# the whole checkpoint, and needs the common state, which the user's strategy never gets.


@dataclass
class EnclosingSave:
    """The save that called a user's strategy.

    Attributes:
        directory: the directory of the checkpoint.
        common: common state, including content metadata.
        is_taken: whether a strategy of ours saves, or will save, the whole checkpoint.
    """

    directory: str
    common: StateDict
    is_taken: bool = False


_CURRENT: ContextVar[EnclosingSave | None] = ContextVar("enclosing save", default=None)


@contextmanager
def enclosing_save(save: EnclosingSave) -> Iterator[None]:
    """Give saves of megackpt in this block, to the same directory, the common state of a save."""
    token = _CURRENT.set(save)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def take_common(checkpoint_dir: str | os.PathLike[str]) -> StateDict | None:
    """Return the common state of the enclosing save to this directory; None if there is no such save.

    Local. The enclosing save then leaves the commit to the inner one.
    """
    current = _CURRENT.get()
    if current is None or _absolute(checkpoint_dir) != _absolute(current.directory):
        return None
    current.is_taken = True
    return current.common


def _absolute(directory: str | os.PathLike[str]) -> str:
    text = os.fspath(directory)
    return text.rstrip("/") if is_url(text) else os.path.abspath(text)
