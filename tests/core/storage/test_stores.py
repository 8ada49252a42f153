"""Every store keeps the contract of stores, and a path or URL opens the right one."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import Checkpointer, LoadOptions, LocalTier, ShardedTensor
from megackpt.cli import main
from megackpt.errors import CheckpointError, DeclarationError, StorageError
from megackpt.storage import FileOptions, LocalStore, MemoryStore, Store, as_store, file_writer, open_store
from megackpt.storage.views import PrefixStore
from megackpt.testing.faulty_store import READS, FaultyStore, Operation, access_denied, io_error
from megackpt.testing.store_suite import StoreConformance, read_range, write_stream
from tests.support.states import filled
from tests.support.writers import RequiredMethodsOnly

# Small buffers, so that streams of a few megabytes go around the pipeline many times.
SMALL = FileOptions(direct_from_bytes=1, buffer_bytes=64 << 10, buffers=3, threads=2)
BUFFERED = FileOptions(direct=False)


STORES: dict[str, Callable[[Path], Store]] = {
    "direct": lambda path: LocalStore(path / "ckpt", files=SMALL, open_files=3),
    "shared memory": lambda path: LocalStore(path, files=SMALL),
    "buffered": lambda path: LocalStore(path / "ckpt", files=BUFFERED),
    "memory": lambda path: MemoryStore("memory:test"),
    "forwarding": lambda path: as_store(RequiredMethodsOnly(path)),
    "faulty, without faults": lambda path: FaultyStore(LocalStore(path)),
    "prefix": lambda path: PrefixStore(MemoryStore(files={"runs": b"", "run-a": b""}), "run/a"),
}


class TestStores(StoreConformance):
    checks_wording = True

    @pytest.fixture(params=STORES)
    def store(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        if request.param == "buffered":
            monkeypatch.setattr(file_writer, "_FLUSH_EVERY_BYTES", 1 << 20)
        is_shared = request.param == "shared memory"
        return STORES[request.param](request.getfixturevalue("memory_path") if is_shared else tmp_path)


class Reworded:
    """A store, or a writer of one, whose errors have the types and fields of ours, and other texts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._reworded(attribute) if callable(attribute) else attribute

    def __enter__(self) -> Reworded:
        self._reworded(self._inner.__enter__)()
        return self

    def __exit__(self, *raised: object) -> Any:
        return self._reworded(self._inner.__exit__)(*raised)

    def _reworded(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = method(*args, **kwargs)
            except CheckpointError as error:
                error.args = ("nope",)
                raise
            except ValueError:
                raise ValueError("nope") from None
            return Reworded(result) if method.__name__ == "open_writer" else result

        return call


class TestStoresWithOtherErrorTexts(StoreConformance):
    @pytest.fixture(params=["reworded", "required methods only"])
    def store(self, request: pytest.FixtureRequest, tmp_path: Path) -> Any:
        return Reworded(MemoryStore()) if request.param == "reworded" else RequiredMethodsOnly(tmp_path)


@pytest.mark.parametrize("strategy", ["megackpt", "torch_dist", "zarr", ("zarr", 3)], ids=str)
def test_every_format_needs_the_required_methods_only(tmp_path: Path, strategy: Any) -> None:
    store = RequiredMethodsOnly(tmp_path)
    for value in (1.0, 2.0):  # the second save replaces the first
        megackpt.save({"w": filled(value, 70_000), "step": 3}, store, strategy)  # type: ignore[arg-type]
        loaded = megackpt.load({"w": filled(0, 70_000)}, store)  # type: ignore[arg-type]
        assert torch.equal(loaded["w"], torch.full((70_000,), value))
        assert loaded["step"] == 3


def test_checkpoints_of_a_run_need_the_required_methods_only(tmp_path: Path) -> None:
    with megackpt.Checkpointer(RequiredMethodsOnly(tmp_path), keep_last=2) as checkpointer:  # type: ignore[arg-type]
        for step in (1, 2, 3):
            checkpointer.save(step, {"step": step})
        assert checkpointer.load({})["step"] == 3
    assert checkpointer.steps() == (2, 3)


def test_a_store_is_used_as_it_is_and_anything_else_is_an_error(tmp_path: Path) -> None:
    local = LocalStore(tmp_path)
    assert as_store(local) is local
    with pytest.raises(DeclarationError, match=r"3 is not a location of a checkpoint\. Give a path"):
        as_store(3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    local = LocalStore(tmp_path / "ckpt", files=SMALL)
    local.create()
    yield local
    local.close()


# Opening.


def test_open_store_serves_paths(tmp_path: Path) -> None:
    assert open_store(tmp_path).location == str(tmp_path)
    assert open_store("some/dir").location == str(Path("some/dir").absolute())


@pytest.mark.parametrize("url", ["hdfs://host/ckpt", "memory://x"])
def test_open_store_names_the_urls_it_cannot_serve(url: str) -> None:
    scheme = url.split("://")[0]
    message = f"{url}: there is no store for {scheme}://.*Mount the location as a directory"
    with pytest.raises(StorageError, match=message):
        open_store(url)


def test_an_empty_path_is_an_error() -> None:
    with pytest.raises(StorageError, match=r"empty path names no checkpoint directory. Give its path"):
        open_store("")


def test_create_on_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for name in ("f", "f/g"):
        message = f"/{name}: cannot create the directory: .*ENOTDIR.*/f is a file where a directory"
        with pytest.raises(StorageError, match=message):
            LocalStore(tmp_path / name).create()


def test_a_store_that_was_never_created_is_empty_and_cannot_be_written_to(tmp_path: Path) -> None:
    local = LocalStore(tmp_path / "none")
    assert local.names() == []
    assert not local.exists("a")
    with pytest.raises(StorageError, match=r"none/a: cannot create: .*ENOENT.*store was created before"):
        local.write("a", b"")


def test_a_store_keeps_its_directory_when_the_process_changes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = LocalStore("ckpt")
    local.create()
    monkeypatch.chdir("/")
    local.write("a", b"1")
    assert (tmp_path / "ckpt" / "a").read_bytes() == b"1"


# Nothing outside of the directory, and nothing but regular files.


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalStore(tmp_path / "link").write("a", b"1")
    assert (tmp_path / "real" / "a").read_bytes() == b"1"


def test_a_linked_file_is_never_read(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "ckpt" / "a").symlink_to(tmp_path / "secret")
    for use in _reads(store, "a"):
        message = r"ckpt/a: it is a symbolic link, not a regular file.*Put the real"
        with pytest.raises(StorageError, match=message):
            use()
    assert store.names() == []


def test_a_linked_directory_is_never_entered(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a").write_bytes(b"secret")
    (tmp_path / "ckpt" / "data").symlink_to(tmp_path / "outside")
    uses: list[Callable[[], object]] = [
        *_reads(store, "data/a"),
        lambda: store.write("data/a", b""),
        lambda: store.replace("data/a", b""),
        lambda: store.open_writer("data/a", 1),
        lambda: store.delete(["data/a"]),
        lambda: store.write("data/sub/a", b""),
    ]
    for use in uses:
        with pytest.raises(StorageError, match=r"ckpt/data: it is a symbolic link"):
            use()
    assert store.names() == []
    assert (tmp_path / "outside" / "a").read_bytes() == b"secret"
    assert os.listdir(tmp_path / "outside") == ["a"]


def test_writing_over_a_link_leaves_its_target_alone(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    for name, write in (("a", store.write), ("b", store.replace)):
        (tmp_path / "ckpt" / name).symlink_to(tmp_path / "target")
        write(name, b"new")
        assert store.read(name, max_bytes=3) == b"new"
    (tmp_path / "ckpt" / "c").symlink_to(tmp_path / "target")
    store.delete(["c"])
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_a_pipe_does_not_block_the_reader(store: LocalStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ckpt" / "a")
    for use in _reads(store, "a"):
        with pytest.raises(StorageError, match=r"ckpt/a: it is a named pipe, not a regular file"):
            use()


def test_a_directory_is_not_a_file(store: LocalStore) -> None:
    store.write("d/a", b"")
    with pytest.raises(StorageError, match=r"ckpt/d: it is a directory, not a regular file"):
        store.size("d")
    with pytest.raises(StorageError, match=r"ckpt/d: cannot delete: .*EISDIR"):
        store.delete(["d"])


def test_sockets_and_odd_names_are_not_listed(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "ckpt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
    (tmp_path / "ckpt" / "a\\b").write_bytes(b"")
    with pytest.raises(StorageError, match="it is a socket"):
        store.exists("socket")
    assert store.names() == []


def _reads(store: LocalStore, name: str) -> list[Callable[[], object]]:
    return [
        lambda: store.read(name, max_bytes=10),
        lambda: read_range(store, name, 0, 1),
        lambda: store.size(name),
        lambda: store.exists(name),
    ]


def test_a_directory_in_memory_is_gone_with_its_last_file() -> None:
    store = MemoryStore(files={"d/sub/a": b"", "d/b": b""})
    store.write("d/b", b"again")
    store.open_writer("d/sub/a", 0).close()
    store.move("d/b", "b")
    with pytest.raises(StorageError, match="EISDIR"):
        store.write("d", b"")
    store.delete(["d/sub/a", "d/sub/a"])
    store.write("d", b"a file now")
    assert store.names() == ["b", "d"]


def test_a_prefix_may_not_lead_outside() -> None:
    with pytest.raises(StorageError):
        PrefixStore(MemoryStore(), "..")


STATE = {"w": filled(1, 2)}


def empty() -> dict[str, ShardedTensor]:
    return {"w": filled(0, 2)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the home directory; the working directory is another, empty one."""
    there, here = tmp_path / "home", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(there))
    monkeypatch.chdir(here)
    yield there
    assert os.listdir(here) == []  # nothing was made in a directory called ~


@pytest.mark.parametrize("kind", [str, Path])
def test_save_and_load_find_the_home_directory(home: Path, kind: type) -> None:
    megackpt.save(STATE, kind("~/a"))
    assert (home / "a" / "metadata.json").is_file()
    assert torch.equal(megackpt.load(empty(), kind("~/a"))["w"], torch.ones(2))
    assert LocalStore("~/a").location == open_store(kind("~/a")).location == str(home / "a")


def test_a_checkpointer_its_tiers_and_its_copies_find_the_home_directory(home: Path) -> None:
    with Checkpointer("~/run", tiers=[LocalTier("~/tier", replication_factor=1)]) as checkpointer:
        assert checkpointer.root == home / "run"
        checkpointer.save(1, STATE)
    assert (home / "run" / "iter_0000001" / "metadata.json").is_file()
    assert (home / "tier" / "iter_0000001" / "metadata.json").is_file()
    data = next((home / "run" / "iter_0000001" / "data").iterdir())
    shutil.copytree(home / "run" / "iter_0000001", home / "other" / "iter_0000001")
    data.unlink()
    options = LoadOptions(on_corrupt="fallback", copies=("~/other",))
    loaded = Checkpointer("~/run", load_options=options).load(empty(), 1)
    assert torch.equal(loaded["w"], torch.ones(2))


def test_commands_find_the_home_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Checkpointer("~/run") as checkpointer:
        checkpointer.save(1, STATE)
    for command in ("ls ~/run", "pin ~/run 1", "gc ~/run --keep-all"):
        assert main(command.split()) == 0
    for command in ("verify {}", "inspect {}", "diff {0} {0}", "repair {}", "convert {} ~/new --to zarr"):
        assert main(command.format("~/run/iter_0000001").split()) == 0
    assert (home / "new" / "metadata.json").is_file()
    assert main(["plan", "~/run/iter_0000001", "--json"]) == 0
    assert main(["plan", "gpt-125m", "--from", "tp1", "--chart=~/plan.svg"]) == 0
    assert (home / "plan.svg").is_file()
    capsys.readouterr()


def test_a_file_where_a_directory_is_needed_is_named_and_nobody_else_is_blamed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below" / "it"):
        for use in (
            lambda path=path: megackpt.save(STATE, path),
            lambda path=path: megackpt.load(STATE, path),
            lambda path=path: Checkpointer(path).save(1, STATE),
            lambda path=path: Checkpointer(path).load(STATE),
            lambda path=path: Checkpointer(path).steps(),
        ):
            with pytest.raises(StorageError, match="ENOTDIR") as caught:
                use()
            assert f"{file} is a file where a directory is needed" in str(caught.value)
            assert "another process" not in str(caught.value)
    assert file.read_text() == "x"


def _save(store: Store) -> None:
    """A little save: two streams of two writes, then the commit."""
    store.create()
    for name in ("a", "b"):
        write_stream(store, name, b"12", part_bytes=1)
    store.sync()
    store.replace("commit", b"done")


def test_faulty_store_records_what_is_done() -> None:
    store = FaultyStore(MemoryStore())
    _save(store)
    stream = ["open_writer", "writer.write", "writer.write", "writer.close"]
    assert [op.kind for op in store.operations] == ["create", *stream, *stream, "sync", "replace"]
    assert store.operations[2] == Operation(index=2, kind="writer.write", name="a", nbytes=1)


@pytest.mark.parametrize("index", range(11))
def test_faulty_store_fails_at_each_operation_in_turn(tmp_path: Path, index: int) -> None:
    store = FaultyStore(LocalStore(tmp_path, files=SMALL), fail_at=index, error=io_error)
    with pytest.raises(StorageError, match="EIO") as caught:
        _save(store)
    assert caught.value.errno == errno.EIO
    assert len(store.operations) == index + 1
    failed = store.operations[-1].name
    assert failed not in LocalStore(tmp_path).names()
    assert not LocalStore(tmp_path).exists("commit")


def test_faulty_store_fails_where_a_function_chooses_and_may_do_the_work_first() -> None:
    inner = MemoryStore()
    options: dict[str, Any] = {"error": access_denied, "after": True, "kinds": {"replace"}}
    store = FaultyStore(inner, fail_at=lambda op: op.kind == "replace", **options)
    with pytest.raises(StorageError, match=r"memory:/commit: cannot replace: .*EACCES"):
        _save(store)
    assert inner.read("commit", max_bytes=4) == b"done"
    assert len(store.operations) == 1


def test_faulty_store_fails_reads() -> None:
    inner = MemoryStore()
    inner.write("a", b"1")
    store = FaultyStore(inner, fail_at=1, kinds=READS, error=lambda: StorageError("my own"))
    assert store.exists("a")
    with pytest.raises(StorageError, match="my own"):
        read_range(store, "a", 0, 1)


@pytest.mark.parametrize(
    ("text", "correction"),
    [
        (
            "s3:/bucket/run",
            "Give 's3://bucket/run' as a string; for a directory of this name, './s3:/bucket/run'",
        ),
        ("s3:bucket/run", "Give 's3://bucket/run' as a string"),
        ("gs:/b", "Give 'gs://b' as a string"),
        ("S3:/b/r", "Give 's3://b/r' as a string"),
        ("S3://b/r", "Give 's3://b/r' as a string"),
        ("s3a://b/r", "Give 's3://b/r' as a string"),
        ("gcs://b/r", "Give 'gs://b/r' as a string"),
        ("abfss://c@account.dfs.core.windows.net/r", "Give 'az://c/r' as a string"),
        ("dbfs:/run", "Give the path, '/dbfs/run'; for a directory of this name, './dbfs:/run'"),
        ("dbfs://run", "Give the path, '/dbfs/run'"),
        ("file:/tmp/x", "Give the path, '/tmp/x'"),
        ("file:///tmp/x", "Give the path, '/tmp/x'."),
        ("hf://me/x", "hf download REPO --local-dir DIR"),
        ("hdfs:/x/y", "Mount the location as a directory"),
        ("https://x/y", "Mount the location as a directory"),
    ],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_what_looks_like_a_url_is_no_local_directory(
    text: str, correction: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A Path has one slash, of which a directory may have the name.
    with pytest.raises(StorageError, match=re.escape(correction.rstrip(".").partition(";")[0])):
        open_store(kind(text))
    if kind is str:
        with pytest.raises(StorageError, match=re.escape(correction)):
            open_store(text)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a:b", "C:/run", "run:1/x", "./s3:/bucket", "x/dbfs:/run"])
def test_a_path_with_a_colon_is_a_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store(text).location.endswith(str(Path(text)))
