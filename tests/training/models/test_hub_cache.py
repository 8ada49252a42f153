"""Snapshots in the cache of huggingface_hub are read through links into `blobs`, and through no others."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import megackpt
from megackpt import NotACheckpointError, StorageError
from megackpt.storage import LocalStore

REVISION = "0123456789abcdef0123456789abcdef01234567"
DIGEST = "5e" * 32
CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory in a cache: a snapshot with one link to a blob, `name`, and a secret outside."""
    model = tmp_path / "hub" / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / DIGEST).write_bytes(b"shared")
    snapshot = model / "snapshots" / REVISION
    (snapshot / "below").mkdir(parents=True)
    (snapshot / "name").symlink_to(f"../../blobs/{DIGEST}")
    (tmp_path / "secret").write_bytes(b"secret")
    return model


@pytest.fixture
def store(model: Path) -> Iterator[LocalStore]:
    """The snapshot as a store, which finds out about each file when it is asked for it."""
    store = LocalStore(model / "snapshots" / REVISION)
    yield store
    store.close()


def test_links_into_blobs_count_as_files_at_any_depth(model: Path, store: LocalStore) -> None:
    snapshot = model / "snapshots" / REVISION
    (snapshot / "below" / "name").symlink_to(f"../../../blobs/{DIGEST}")
    (snapshot / "real").write_bytes(b"real")
    assert store.names() == ["below/name", "name", "real"]
    for name in ("name", "below/name"):
        assert store.exists(name)
        assert store.size(name) == 6
        assert store.read(name, max_bytes=6) == b"shared"
        part = bytearray(3)
        store.read_into(name, 2, memoryview(part))
        assert part == b"are"
    store.delete(["name"])
    assert (model / "blobs" / DIGEST).read_bytes() == b"shared"
    assert store.names() == ["below/name", "real"]


def _device(blob: Path) -> None:
    try:
        os.mknod(blob, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except OSError:  # only root may
        os.mkfifo(blob)


def _socket(blob: Path) -> None:
    here = os.getcwd()
    os.chdir(blob.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(blob.name)
    finally:
        os.chdir(here)


BLOBS: dict[str, Callable[[Path], object]] = {
    "a chain": lambda blob: blob.symlink_to(DIGEST),
    "a chain that leads out": lambda blob: blob.symlink_to("../../../secret"),
    "a directory": lambda blob: (blob / "below").mkdir(parents=True),
    "a device": _device,
    "a pipe": os.mkfifo,
    "a socket": _socket,
}
"""What a blob may be instead of a file."""


def _another_model(model: Path) -> str:
    (model.parent / "models--org--other" / "blobs").mkdir(parents=True)
    (model.parent / "models--org--other" / "blobs" / "0a").write_bytes(b"x")
    return "../../../models--org--other/blobs/0a"


ATTACKS: dict[str, Callable[[Path], str]] = {
    "out of the cache": lambda model: "../../../../secret",
    "by an absolute path": lambda model: str(model.parents[1] / "secret"),
    "to a blob by an absolute path": lambda model: str(model / "blobs" / DIGEST),
    "through blobs and back": lambda model: "../../blobs/../../../secret",
    "to a blob below": lambda model: f"../../blobs/0a/{DIGEST}",
    "to blobs itself": lambda model: "../../blobs",
    "to blobs itself with a slash": lambda model: "../../blobs/",
    "to the parent of blobs": lambda model: "../../blobs/..",
    "too short": lambda model: f"../blobs/{DIGEST}",
    "too long": lambda model: f"../../../blobs/{DIGEST}",
    "with a newline": lambda model: f"../../blobs/{DIGEST}\n",
    "to another file of the snapshot": lambda model: "name",
    "to a directory of the snapshot": lambda model: "below",
    "to itself": lambda model: "attack",
    "to /dev/zero": lambda model: "/dev/zero",
    "to another model": _another_model,
}


@pytest.mark.parametrize("attack", [*ATTACKS, *BLOBS])
def test_a_link_of_another_form_is_not_followed(attack: str, model: Path, store: LocalStore) -> None:
    if attack in BLOBS:
        BLOBS[attack](model / "blobs" / "0a")
    link = "../../blobs/0a" if attack in BLOBS else ATTACKS[attack](model)
    (model / "snapshots" / REVISION / "attack").symlink_to(link)
    assert store.names() == ["name"]
    calls: list[Callable[[], object]] = [
        lambda: store.read("attack", max_bytes=10),
        lambda: store.exists("attack"),
        lambda: store.size("attack"),
        lambda: store.read_into("attack", 0, memoryview(bytearray(1))),
    ]
    for call in calls:
        with pytest.raises(StorageError, match=r"attack: it is .*, not a regular file|attack.*[Nn]o such"):
            call()


def test_a_link_to_nothing_is_a_missing_file(model: Path, store: LocalStore) -> None:
    (model / "snapshots" / REVISION / "gone").symlink_to("../../blobs/0a")
    assert store.names() == ["name"]
    assert not store.exists("gone")
    with pytest.raises(StorageError, match=r"gone.*No such file"):
        store.read("gone", max_bytes=1)


def test_a_linked_directory_is_never_entered(model: Path, store: LocalStore) -> None:
    (model / "snapshots" / REVISION / "linked").symlink_to("../../blobs")
    assert store.names() == ["name"]
    with pytest.raises(StorageError, match="linked: it is a symbolic link"):
        store.read(f"linked/{DIGEST}", max_bytes=10)


def test_blobs_that_are_a_link_are_not_entered(model: Path, store: LocalStore) -> None:
    (model / "blobs").rename(model / "elsewhere")
    (model / "blobs").symlink_to("elsewhere")
    for call in (store.names, lambda: store.read("name", max_bytes=10), lambda: store.exists("name")):
        with pytest.raises(StorageError):
            call()


def test_a_link_that_is_swapped_while_it_is_read_changes_nothing(model: Path, store: LocalStore) -> None:
    link = model / "snapshots" / REVISION / "name"
    part = bytearray(6)
    store.read_into("name", 0, memoryview(part))
    link.unlink()
    link.symlink_to("../../../../secret")
    store.read_into("name", 0, memoryview(part))  # the file that is open
    assert part == b"shared"
    with pytest.raises(StorageError, match="name: it is a symbolic link"):
        store.read("name", max_bytes=6)


def test_a_link_that_is_swapped_between_its_text_and_its_file_leads_nowhere_else(
    model: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, readlink = model / "snapshots" / REVISION / "name", os.readlink

    def swapped(leaf: str, *, dir_fd: int) -> str:
        text = readlink(leaf, dir_fd=dir_fd)
        link.unlink()
        link.symlink_to("../../../../secret")
        return text

    monkeypatch.setattr(os, "readlink", swapped)
    assert store.read("name", max_bytes=6) == b"shared"


@pytest.mark.parametrize("parent", ["models--org--name/other", "datasets--org--name/snapshots", "snapshots"])
def test_links_of_other_directories_are_not_followed(parent: str, tmp_path: Path) -> None:
    folder = tmp_path / parent / REVISION
    folder.mkdir(parents=True)
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    (blobs / DIGEST).write_bytes(b"shared")
    (folder / "name").symlink_to(f"../../blobs/{DIGEST}")
    store = LocalStore(folder)
    assert store.names() == []
    with pytest.raises(StorageError, match="name: it is a symbolic link"):
        store.read("name", max_bytes=10)
    store.close()


def test_the_folder_that_snapshot_download_returns_is_read_loaded_and_imported(tmp_path: Path) -> None:
    """In a cache that functions of huggingface_hub itself have made."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra huggingface is not installed")
    from huggingface_hub.file_download import _create_symlink, repo_folder_name

    from megackpt.maps import family_of

    made = family_of(CONFIG).region_map(CONFIG)
    tensors = {key: torch.randn(array.stored) for key, array in made.right.items()}
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    save_file(tensors, downloaded / "model.safetensors", {"format": "pt"})
    (downloaded / "config.json").write_text(json.dumps(CONFIG))
    (downloaded / "tokenizer.json").write_text("{}")
    cached = tmp_path / "hub" / repo_folder_name(repo_id="org/name", repo_type="model")
    for folder in ("blobs", "refs", f"snapshots/{REVISION}"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text(REVISION)
    for number, file in enumerate(sorted(downloaded.iterdir())):
        blob = cached / "blobs" / (f"{number}e" * 20)
        file.rename(blob)
        _create_symlink(str(blob), str(cached / "snapshots" / REVISION / file.name), new_blob=True)
        assert (cached / "snapshots" / REVISION / file.name).is_symlink()
    snapshot = hub.snapshot_download("org/name", cache_dir=tmp_path / "hub", local_files_only=True)
    assert Path(snapshot) == cached / "snapshots" / REVISION

    assert megackpt.load_plain_tensors(snapshot).keys() == tensors.keys()
    assert not megackpt.verify(snapshot).damages
    report = megackpt.import_huggingface(snapshot, tmp_path / "imported")
    assert report.files == ("tokenizer.json",)
    megackpt.export_huggingface(tmp_path / "imported", tmp_path / "folder", config=snapshot)
    written = megackpt.load_plain_tensors(tmp_path / "folder")
    assert all(torch.equal(tensor, written[key]) for key, tensor in tensors.items())
    assert (tmp_path / "folder" / "tokenizer.json").read_text() == "{}"

    (Path(snapshot) / "model.safetensors").unlink()
    (Path(snapshot) / "model.safetensors").symlink_to(tmp_path / "folder" / "model.safetensors")
    with pytest.raises(NotACheckpointError, match="symbolic links"):
        megackpt.load_plain_tensors(snapshot)
