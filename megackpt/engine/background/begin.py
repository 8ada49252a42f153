"""The meeting in which an asynchronous save begins: what ranks tell each other, what they do meanwhile.

Owns the error of an earlier save, connecting writers anew, and the copy that is made on the guess that all
take the plan of an earlier save. What is planned in this meeting is `save.plan_state`'s.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from megackpt.comm import Group, encode_error
from megackpt.comm.messages import decode_error
from megackpt.engine.background.session import WriterSession
from megackpt.engine.background.stage_ahead import Ahead, stage_ahead
from megackpt.engine.saving.local_state import LocalState
from megackpt.engine.saving.plan_agreement import PlanAgreement
from megackpt.errors import CheckpointError
from megackpt.options import SaveOptions


class Beginning:
    """What a rank does beside planning, see `save.Beside`; all ranks make one for a save, or none does.

    The error of an earlier save is raised within earlier; where that holds it back, this save goes on.
    Without, it is left for the next one to ask.

    Attributes:
        count: how many numbers a rank tells.
        is_any_busy: whether a save is under way on some rank.
        is_over: whether all ranks have heard each other's numbers.
        has_raised: whether the error of an earlier save was raised, and not held back.
        ahead: what was copied meanwhile; None if nothing was.
    """

    count = 3

    def __init__(
        self,
        session: WriterSession,
        group: Group,
        options: SaveOptions,
        *,
        earlier: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._session, self._group, self._options, self._earlier = session, group, options, earlier
        self._error: CheckpointError | None = None
        self.is_any_busy = self.is_over = self.has_raised = False
        self.ahead: Ahead | None = None

    def numbers(self) -> tuple[int, ...]:
        """Say whether an earlier save has failed here, one is under way, the process knows no others."""
        session = self._session
        if self._earlier is not None:
            self._error = self._error or session.failure()
        is_busy = session.running().is_busy
        is_joined = session.joined == (self._group.rank, self._group.size)
        return int(self._error is not None), int(is_busy), int(not is_joined)

    def meanwhile(self, local: LocalState, agreed: PlanAgreement) -> None:
        """Copy what the next job will write if the guess is right."""
        session = self._session
        if (
            self._error is not None
            or session.options.stage_in_background
            or not session.has_room_for(agreed.kept)
        ):
            return
        with contextlib.suppress(Exception):  # met again, and said, when it is copied in its turn
            self.ahead = stage_ahead(session.writer, local, agreed, part_bytes=self._options.part_bytes)

    def heard(self, largest: tuple[int, ...]) -> None:
        """Raise the error of the first rank that has one; connect what is not connected. Collective.

        Raises:
            CheckpointError: the same on every rank.
        """
        self.is_over = True
        has_failed, is_busy, is_apart = largest
        self.is_any_busy = bool(is_busy)
        if has_failed and self._earlier is not None:
            error = self._error
            self._session.joined = None
            said = self._group.all_gather(encode_error(error) if error is not None else b"")
            self.has_raised = True
            with self._earlier:
                raise decode_error(next(one for one in said if one)) from error
            self.has_raised = False
        if has_failed or is_apart:
            self._session.connect(self._group, timeout_s=self._options.timeout_s)
