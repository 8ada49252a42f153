"""torch's writer of its own format in stages: staged now, written in the background, finished by all ranks.

Megatron-LM saves its formats `torch_dcp` and `fsdp_dtensor` with it; the rest of Megatron-Core's use of it is
inside of `dist_checkpointing`, where megackpt's formats write.

Source: Megatron-Core `dist_checkpointing.strategies.filesystem_async`, for the names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, _wrap_exception
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megackpt.errors import DeclarationError

_results_queue: None = None
"""No queue between processes: a writer process reports to the rank that started it."""
WriteBucket: TypeAlias = tuple[
    Any, str, tuple[list[Any], list[Any]]
]  # Megatron-Core's own, for annotations only


class FileSystemWriterAsync(FileSystemWriter):
    """torch's FileSystemWriter, which copies what it writes and writes it when its function is called.

    separation_hint and use_msc have no effect. Make one for each save.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, *args, **kwargs)
        self.separation_hint = separation_hint
        self.use_msc = use_msc
        self._plan: Any = None
        self._staged: Any = _StagedPlanner({})
        self._results: list[Any] | WRAPPED_EXCEPTION | None = None

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Copy what a plan writes to host memory. Afterwards the state may change. Local."""
        self._plan = plan
        self._staged = _StagedPlanner(
            {item.index: _copied(planner.resolve_data(item)) for item in plan.items}
        )

    def get_save_function_and_args(self) -> tuple[Callable[..., Any] | None, None, list[Any]]:
        """Return the function that writes, no function that stages, and no arguments."""
        return self._write, None, []

    def retrieve_write_results(self) -> list[Any] | WRAPPED_EXCEPTION:
        """Return what was written, or the error of it, as `torch.distributed.checkpoint` passes errors on.

        Raises:
            DeclarationError: the function has not been called.
        """
        if self._results is None:
            raise DeclarationError(
                "Nothing was written: call what get_save_function_and_args() returns, or schedule it in an "
                "AsyncCallsQueue, before results are asked for."
            )
        return self._results

    def _write(self) -> None:
        try:
            self._results = self.write_data(self._plan, self._staged).value()
        except Exception as error:  # noqa: BLE001 - raised on all ranks when the save is finished
            self._results = _wrap_exception(error)
        self._staged = _StagedPlanner({})


@dataclass(frozen=True)
class _StagedPlanner:
    """Stands for the planner when the copies are written."""

    data: dict[Any, Any]

    def resolve_data(self, item: Any) -> Any:
        """Return the copy of what an item writes."""
        return self.data[item.index]


def get_write_results_queue(mp_mode: str = "spawn") -> None:
    """Return None: there is no queue of results to set up before the first save."""
    return _results_queue


def _copied(data: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return data  # bytes that the planner has made for this item
    return data.detach().to("cpu", copy=True)
