"""What would be lost without a word: unknown dtypes, common state of another save, reserved keys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megackpt import (
    FormatError,
    ShardedTensor,
    UnserializableError,
    convert,
    load,
    load_common_state_dict,
    load_plain_tensors,
    save,
)
from megackpt.storage import LocalStore

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:.*ComplexHalf", "ignore:Detected an existing checkpoint"
)


class Silent:
    """Gets progress, and prints nothing."""

    def begin(self, doing: str, nbytes: int) -> None:
        """Do nothing."""

    def advance(self, nbytes: int) -> None:
        """Do nothing."""


def tensor(key: str) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.arange(4.0))


@pytest.fixture
def with_complex32(tmp_path: Path) -> Path:
    state = {"w": torch.arange(4.0), "z": torch.zeros(3, dtype=torch.complex32)}
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_an_array_of_a_dtype_that_cannot_be_loaded_is_no_missing_key(with_complex32: Path) -> None:
    assert torch.equal(load({"w": tensor("w")}, with_complex32)["w"], torch.arange(4.0))
    with pytest.raises(FormatError, match=r"'z' is stored as complex32, which cannot be loaded"):
        load({"w": tensor("w"), "z": tensor("z")}, with_complex32)
    with pytest.raises(FormatError, match=r"'z' is stored as complex32"):
        load_plain_tensors(with_complex32)


def test_a_conversion_that_would_leave_an_array_out_raises_an_error(
    with_complex32: Path, tmp_path: Path
) -> None:
    source, target = LocalStore(with_complex32), LocalStore(tmp_path / "new")
    with pytest.raises(FormatError, match=r"'z' is stored as complex32"):
        convert(source, target, ("megackpt", 1))
    assert not (tmp_path / "new/metadata.json").exists()


def test_common_state_of_the_save_before_is_not_that_of_what_dcp_saved_over_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save({"w": tensor("w"), "step": 1}, tmp_path, sharded_strategy=("torch_dist", 1))
    assert load_common_state_dict(tmp_path)["step"] == 1
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    with caplog.at_level(logging.WARNING):
        assert load_common_state_dict(tmp_path) == {}
    assert "written with another .metadata" in caplog.text
    assert torch.equal(load({"w": tensor("w")}, tmp_path)["w"], torch.ones(4))


@pytest.mark.parametrize("content", [None, {"a": 1}], ids=["without", "with content metadata"])
def test_a_key_of_the_users_that_zarr_1_uses_itself_raises_an_error(tmp_path: Path, content: object) -> None:
    state = {"w": tensor("w"), "content_metadata": "mine"}
    with pytest.raises(UnserializableError, match="state dict has this key"):
        save(state, tmp_path, sharded_strategy=("zarr", 1), content_metadata=content)
