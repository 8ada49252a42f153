"""URLs of a third party's store, as it is installed; not collected by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megackpt_npyfiles.shelf import ShelfStore

import megackpt
from megackpt import Checkpointer, ShardedTensor, StorageError
from megackpt.cli import main
from megackpt.storage import ObjectStore, Store, open_store
from megackpt.testing.store_suite import StoreConformance


@pytest.fixture(autouse=True)
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHELF", str(tmp_path))
    return tmp_path


def tensor(value: float) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}


class TestShelf(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("shelf://tested")


def test_its_urls_can_be_given_wherever_a_path_can(
    shelf: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    megackpt.save(tensor(1), "shelf://run/one")
    assert (shelf / "run" / "one" / "metadata.json").is_file()
    assert torch.equal(megackpt.load(tensor(0), "shelf://run/one")["w"], torch.ones(4))
    for is_async in (False, True):
        with Checkpointer("shelf://steps", async_save=is_async, keep_last=2) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(step + 3 * is_async, tensor(step))
            assert torch.equal(checkpointer.load(tensor(0))["w"], torch.full((4,), 3.0))
    assert checkpointer.steps() == (5, 6)
    assert (checkpointer.root, checkpointer.location(5)) == ("shelf://steps", "shelf://steps/iter_0000005")
    assert main(["ls", "shelf://steps", "--json"]) == 0
    assert [step["step"] for step in json.loads(capsys.readouterr().out)["steps"]] == [5, 6]
    assert main(["verify", "shelf://steps", "--deep"]) == 0
    assert main(["pin", "shelf://steps", "5"]) == 0
    assert main(["convert", "shelf://run/one", "shelf://run/two", "--to", "torch_dist"]) == 0
    assert main(["diff", "shelf://run/one", "shelf://run/two"]) == 0


def test_what_cannot_be_loaded_and_what_is_not_known_is_named() -> None:
    with pytest.raises(
        StorageError, match=r"broken://x: the store for broken:// .*megackpt_npyfiles.shelf:nothing"
    ):
        open_store("broken://x")
    with pytest.raises(
        StorageError,
        match=r"no store for nowhere:// locations; there are stores for s3://, broken://, shelf://",
    ):
        megackpt.load(tensor(0), "nowhere://x")


def test_a_package_does_not_replace_our_object_stores() -> None:
    assert not isinstance(open_store("s3://bucket/run"), ShelfStore)
    assert isinstance(open_store("s3://bucket/run"), ObjectStore)
