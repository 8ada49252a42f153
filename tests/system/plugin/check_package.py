"""What a third party's installed package adds: a format, a store, families; not collected by itself.

The suite has to fail strategies that are broken in one way each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megackpt_npyfiles
import pytest
import torch
from megackpt_npyfiles.names import LLAMA, NANO
from megackpt_npyfiles.shelf import ShelfStore
from safetensors.torch import save_file

import megackpt
from megackpt import Checkpointer, ShardedTensor, StorageError
from megackpt.cli import main
from megackpt.errors import MapError
from megackpt.formats.contents import Contents
from megackpt.formats.registry import load_strategy, save_strategy
from megackpt.formats.strategy import Format
from megackpt.maps import family, family_of, known_families
from megackpt.storage import ObjectStore, Store, open_store
from megackpt.testing.format_suite import FormatConformance
from megackpt.testing.store_suite import StoreConformance


class TestNpyFiles(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return megackpt_npyfiles.FORMAT


def test_it_is_found_by_its_name_and_by_a_manifest() -> None:
    assert isinstance(save_strategy("npyfiles"), megackpt_npyfiles.Save)
    manifest = {"sharded_backend": "npyfiles", "sharded_backend_version": 1}
    assert isinstance(load_strategy(manifest, where="here"), megackpt_npyfiles.Load)


class AlwaysFromTheStart(megackpt_npyfiles.NpyChunks):
    """Reads the wrong part of a chunk."""

    def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
        super().read_into(row, 0, out, verify=verify)


class ReadsFromTheStart(megackpt_npyfiles.Load):
    def open(self, *args: Any, **kwargs: Any) -> Contents:
        contents = super().open(*args, **kwargs)
        broken = contents.chunks

        def chunks(keys: Any) -> Any:
            actual = broken(keys)
            actual.__class__ = AlwaysFromTheStart
            return actual

        return Contents(contents.arrays, chunks, contents.common, contents.decode_object, contents.identity)


class SameNameEverySave(megackpt_npyfiles.Save):
    """Writes over the files of the checkpoint that is committed."""

    def write_chunks(self, store: Any, *, attempt: str, **rest: Any) -> bytes:
        return super().write_chunks(store, attempt="fixed", **rest)

    def write_index(self, store: Any, *, attempt: str, **rest: Any) -> Any:
        return super().write_index(store, attempt="fixed", **rest)


class TestReadsFromTheStart(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return Format(backend="npyfiles", version=1, save=megackpt_npyfiles.Save, load=ReadsFromTheStart)

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch, format: Format) -> None:
        from megackpt.formats import registry

        monkeypatch.setattr(registry, "_format", lambda name: format)


class TestSameNameEverySave(FormatConformance):
    @pytest.fixture
    def format(self) -> Format:
        return Format(backend="npyfiles", version=1, save=SameNameEverySave, load=megackpt_npyfiles.Load)


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


CONFIG = {"model_type": "nano", "vocab": 5, "width": 3}


def test_it_is_known_by_model_type_and_its_map_loads_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert family("nano") is family_of(CONFIG) is NANO
    assert main(["maps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["families"]["nano"] == ["nano"]
    head = torch.randn(3, 5)
    save_file({"embed": torch.randn(5, 3), "head": head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["maps", "show", "--config", str(tmp_path)]) == 0
    assert "every element of 2 arrays of ours and 2 of nano" in capsys.readouterr().out
    keys = ("embedding.word_embeddings.weight", "output_layer.weight")
    request = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(5, 3)) for key in keys}
    assert torch.equal(megackpt.load(request, tmp_path, maps="auto")["output_layer.weight"], head.T)


def test_a_package_does_not_replace_our_families() -> None:
    assert family("llama") is not LLAMA
    with pytest.raises(MapError, match="model_type 'llama-of-nano'"):
        family_of({"model_type": "llama-of-nano"})


def test_what_cannot_be_used_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    known_families.cache_clear()
    known = known_families()
    assert {"nano", "llama", "gpt2"} <= known.keys()
    assert not {"broken", "text"} & known.keys()
    assert "Map broken (megackpt_npyfiles.names:nothing) cannot be used" in caplog.text
    assert "Map text (megackpt_npyfiles.names:NO_FAMILY) cannot be used: it is a str, not a" in caplog.text
