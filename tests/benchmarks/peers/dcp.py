"""`torch.distributed.checkpoint`, with DTensors.

The settings are the best that its documents name: files synced, one writer per rank with the number of
threads that was fastest in a trial (see `world`), plans and staging memory kept from save to save. Its reader
has no settings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint.staging as staging
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megackpt.cli.benchmark.state import GridLayout, RankState
from tests.benchmarks.peers.contenders import flush


class TorchDistributed:
    """DCP; rank 0 syncs the names of files, which it leaves to the system."""

    name = "dcp"
    thread_counts: tuple[int, ...] = (1, 2, 4)
    can_save_async = True

    def __init__(self, *, shared_memory: bool = False) -> None:
        self.threads = 1
        self._stager = _stager(shared_memory)
        self._meshes: dict[GridLayout, DeviceMesh] = {}
        # Its thread needs ranks' attention while the main thread has its own collectives.
        self._async_group = dist.new_group(backend="gloo")

    def unsupported_reason(self, saved_at: GridLayout, loaded_at: GridLayout) -> str | None:
        """What a rank holds has to be rectangles."""
        if saved_at.is_flat or loaded_at.is_flat:
            return "DTensors are rectangles: flat optimizer shards cannot be declared"
        return None

    def declare(self, state: RankState) -> dict[str, Any]:
        """DTensors over DP and TP of the stage; what is whole on each rank is a plain tensor."""
        mesh = self._mesh(state.layout)
        declared: dict[str, Any] = {}
        for shard in state.shards:
            whole = shard.tp_axis is None
            placements = (Replicate(), Replicate() if shard.tp_axis is None else Shard(shard.tp_axis))
            declared[shard.key] = (
                shard.data if whole else DTensor.from_local(shard.data, mesh, placements, run_check=False)
            )
        return declared

    def save(self, declared: dict[str, Any], directory: Path) -> None:
        """`dcp.save`."""
        save(declared, storage_writer=self._writer(directory), planner=_planner())
        flush(directory)

    def load(self, declared: dict[str, Any], directory: Path) -> None:
        """`dcp.load`, in place."""
        load(declared, storage_reader=FileSystemReader(directory))

    def save_async(self, declared: dict[str, Any], directory: Path) -> Callable[[], Path]:
        """`dcp.async_save` with a thread."""
        future: Any = async_save(
            declared,
            storage_writer=self._writer(directory),
            planner=_planner(),
            process_group=self._async_group,
            **self._async_options(),
        )

        def wait() -> Path:
            getattr(future, "upload_completion", future).result()
            flush(directory)
            return directory

        return wait

    def close(self) -> None:
        """Let go of what asynchronous saves keep."""
        self._stager.close()

    def _async_options(self) -> dict[str, Any]:
        return {} if self._stager is None else {"async_stager": self._stager}

    def _writer(self, directory: Path) -> FileSystemWriter:
        return FileSystemWriter(
            directory, single_file_per_rank=True, sync_files=True, thread_count=self.threads, overwrite=False
        )

    def _mesh(self, layout: GridLayout) -> DeviceMesh:
        if layout not in self._meshes:
            whole = init_device_mesh(
                "cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp")
            )
            self._meshes[layout] = whole["dp", "tp"]
        return self._meshes[layout]


def _planner() -> DefaultSavePlanner:
    return DefaultSavePlanner(enable_plan_caching=True)  # what is kept is kept by the class


def _stager(shared_memory: bool) -> Any:
    """Return what keeps the memory for copies from save to save; None in a torch that has none."""
    if not hasattr(staging, "DefaultStager"):
        return None
    options = staging.StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=shared_memory,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return staging.DefaultStager(options)
