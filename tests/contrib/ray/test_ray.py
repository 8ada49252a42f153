"""Ray Train without a cluster: where steps are, what is reported, wrong input. See also `test_hosts`."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray.train")

import pyarrow.fs
import ray.train

import megackpt
from megackpt.contrib.ray import get_checkpoint, report, step_directory
from megackpt.errors import NotACheckpointError, UnsupportedError


def context_of(filesystem: pyarrow.fs.FileSystem, run: str) -> Any:
    """Return what `ray.train.get_context` returns in the training function."""
    storage = types.SimpleNamespace(storage_filesystem=filesystem, experiment_fs_path=run)
    return types.SimpleNamespace(get_storage=lambda: storage, get_world_rank=lambda: 0)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Put a run in tmp_path into the place of Ray's; return the list of what is reported to it."""
    reports: list[tuple[Any, ...]] = []
    context = context_of(pyarrow.fs.LocalFileSystem(), str(tmp_path))
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(ray.train, "report", lambda *args, **kwargs: reports.append((*args, kwargs)))
    return reports


def test_a_step_is_reported_where_it_is_and_not_uploaded(
    reports: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = step_directory(5)
    assert directory == str(tmp_path / "iter_0000005")
    megackpt.save({"w": torch.ones(2)}, directory)
    report({"loss": 1.0}, directory)
    report({"loss": 0.5})

    (metrics, checkpoint, options), without = reports
    assert metrics == {"loss": 1.0}
    assert options == {"checkpoint_upload_mode": ray.train.CheckpointUploadMode.NO_UPLOAD}
    assert without == ({"loss": 0.5}, {})
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: checkpoint)
    assert get_checkpoint() == directory
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    assert get_checkpoint() is None


def test_a_step_that_is_not_committed_is_not_reported(reports: list[tuple[Any, ...]]) -> None:
    megackpt.save({"w": torch.ones(2)}, step_directory(5))
    Path(step_directory(5), "metadata.json").unlink()
    with pytest.raises(
        NotACheckpointError, match=r"iter_0000005 has no committed checkpoint, so Ray could not"
    ):
        report({}, step_directory(5))
    assert not reports


def test_a_run_in_an_object_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(pyarrow.fs.S3FileSystem(region="us-east-1"), "bucket/run")
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with pytest.raises(UnsupportedError, match=r"a file system of kind s3, and steps of megackpt have to be"):
        step_directory(5)
