"""Every format passes the suite of a third party's; files are recognised by registered names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megackpt import ShardedObject, ShardedTensor, load, save, verify
from megackpt.errors import DeclarationError, UnserializableError, UnsupportedError
from megackpt.formats import native, registry, torch_dist
from megackpt.formats.contents import Chunks
from megackpt.formats.file_names import NATIVE, TORCH_DIST, ZARR_V1, ZARR_V3, FileNames
from megackpt.formats.registry import save_strategy
from megackpt.formats.strategy import Capabilities, ChunkParts, Format, SaveStrategy
from megackpt.formats.zarr import version_3
from megackpt.options import SaveOptions
from megackpt.run import remove_sharded_tensors
from megackpt.storage import MemoryStore, Store
from megackpt.testing.format_suite import FormatConformance
from tests.support.effort import few
from tests.support.zarr_v1 import save_zarr_v1


class TestFormats(FormatConformance):
    examples = few(16, of=60)

    @pytest.fixture(params=[native, version_3], ids=lambda module: module.__name__)
    def format(self, request: pytest.FixtureRequest) -> Format:
        chosen: Format = request.param.FORMAT
        return chosen


class TestFormatsInMemory(FormatConformance):
    examples = few(16, of=60)

    @pytest.fixture(params=[native, version_3], ids=lambda module: module.__name__)
    def format(self, request: pytest.FixtureRequest) -> Format:
        chosen: Format = request.param.FORMAT
        return chosen

    @pytest.fixture
    def new_store(self) -> Callable[[], Store]:
        return MemoryStore


class TestTorchDist(FormatConformance):
    examples = few(16, of=60)
    test_a_save_that_fails_anywhere_leaves_the_old_checkpoint_or_the_new = None
    """`test_torch_dist_saving.py` claims more: which of the two is left, and that no file is."""

    @pytest.fixture
    def format(self) -> Format:
        return torch_dist.FORMAT


FILE_NAMES = {
    ("megackpt", 1): NATIVE,
    ("torch_dist", 1): TORCH_DIST,
    ("zarr", 1): ZARR_V1,
    ("zarr", 3): ZARR_V3,
}
SAVED = [name for name in FILE_NAMES if name != ("zarr", 1)]
ATTEMPT = "0123456789abcdef"


def state() -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.arange(6.0)),
        "o": ShardedObject("o", 1, (1,), (0,)),
        "step": 7,
        "common": torch.ones(3),
    }


@pytest.mark.parametrize("name", SAVED, ids=str)
def test_each_file_of_a_save_carries_the_attempt_or_is_listed_as_a_fixed_name(name: tuple[str, int]) -> None:
    store = MemoryStore()
    save(state(), store, name)
    strategy, names = save_strategy(name), store.names()
    assert strategy.file_names == FILE_NAMES[name]
    fixed = set(strategy.fixed_names(store))
    assert {n for n in names if strategy.file_names.attempt_of(n) is None} == fixed | {"metadata.json"}
    # The fixed names are asked for only where a marker is found.
    assert not fixed or any(map(strategy.file_names.is_marker, names))


@pytest.mark.parametrize("name", SAVED, ids=str)
def test_formats_that_recognise_the_same_name_see_the_same_attempt(name: tuple[str, int]) -> None:
    store = MemoryStore()
    save(state(), store, name)
    for file in store.names():
        attempts = {file_names.attempt_of(file) for file_names in FILE_NAMES.values()} - {None}
        assert len(attempts) <= 1, file


@pytest.mark.parametrize("pattern", [r"part-([0-9a-f]{16})|list-([0-9a-f]{16})\.json"])
def test_the_attempt_is_the_group_that_matched(pattern: str) -> None:
    file_names = FileNames(attempt=pattern)
    assert (
        file_names.attempt_of(f"part-{ATTEMPT}") == file_names.attempt_of(f"list-{ATTEMPT}.json") == ATTEMPT
    )
    assert file_names.attempt_of(f"part-{ATTEMPT}x") is None
    assert not file_names.is_marker("anything")
    assert file_names.is_foreign("anything"), "without a pattern, `detect` has to look"


STALE = [f"__0_0_{ATTEMPT}.distcp", f"zarr-{ATTEMPT}/zarr.json", f".megackpt-{ATTEMPT}/w/.zarray"]


def test_a_commit_removes_stale_files_of_other_formats() -> None:
    # That it imports none of them for this is a claim of tests/system/test_imports.py.
    store = MemoryStore(files=dict.fromkeys([*STALE, "of-others"], b""))
    save({"step": 1}, store)
    assert not set(STALE) & set(store.names())
    assert "of-others" in store.names()


def test_zarr_1_is_only_read_and_the_name_alone_saves_version_3() -> None:
    store = MemoryStore()
    with pytest.raises(DeclarationError, match=r"saves format \('zarr', 1\) \(it is only read\)"):
        save(state(), store, ("zarr", 1))
    with pytest.raises(DeclarationError, match="it is only read"):
        registry.check_known(("zarr", 1), to_save=True)
    assert store.names() == []
    save_zarr_v1(state(), store)
    with pytest.raises(DeclarationError, match="it is only read"):
        remove_sharded_tensors(store, "w")
    assert save_strategy("zarr").version == 3


@pytest.mark.parametrize("strategy", SAVED, ids=str)
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_save_over_zarr_1_replaces_the_checkpoint_and_leaves_its_arrays(
    strategy: tuple[str, int], is_ours: bool
) -> None:
    store = MemoryStore()
    save_zarr_v1(
        state() | {"w": ShardedTensor.from_rank_offsets("w", torch.ones(6)), "step": 1},
        store,
        is_ours=is_ours,
    )
    before = set(store.names()) - {"common.pt"}
    store.write(f".megackpt-{ATTEMPT[::-1]}/w/0", b"of an attempt that was not published")
    save(state(), store, strategy)
    wanted = state()
    wanted["w"].data.zero_()
    loaded = load(wanted, store)
    assert torch.equal(loaded["w"], torch.arange(6.0))
    assert loaded["step"] == 7
    assert verify(store, deep=True).is_whole
    assert before <= set(store.names())
    assert not [name for name in store.names() if ATTEMPT[::-1] in name]


class Minimal(SaveStrategy):
    """The native format through the required methods alone."""

    backend, version, file_names = "megackpt", 1, NATIVE

    def __init__(self) -> None:
        self.native = save_strategy(None)

    def check_common(self, common: Any) -> None:
        self.native.check_common(common)

    def encode_object(self, value: Any, *, path: str) -> bytes:
        return self.native.encode_object(value, path=path)

    def write_chunks(self, store: Any, **arguments: Any) -> bytes:
        return self.native.write_chunks(store, **arguments)

    def write_index(self, store: Any, **arguments: Any) -> Any:
        return self.native.write_index(store, **arguments)

    def write_common(self, store: Any, **arguments: Any) -> Any:
        return self.native.write_common(store, **arguments)

    def committed_attempt(self, store: Any) -> str | None:
        return self.native.committed_attempt(store)

    def remove_arrays(self, store: Any, manifest: Any, *, key_prefix: str) -> Any:
        return self.native.remove_arrays(store, manifest, key_prefix=key_prefix)

    def files_of(self, manifest: Any) -> list[str]:
        return self.native.files_of(manifest)


def test_a_strategy_with_the_required_methods_only_saves_over_another_format() -> None:
    store, wanted = MemoryStore(), state()
    save(state(), store, "torch_dist")
    save(state(), store, Minimal())
    wanted["w"].data.zero_()
    loaded = load(wanted, store)
    assert torch.equal(loaded["w"], torch.arange(6.0))
    assert (loaded["o"], loaded["step"]) == (1, 7)
    assert {NATIVE.attempt_of(n) for n in store.names()} - {None} == {Minimal().committed_attempt(store)}
    assert not [n for n in store.names() if TORCH_DIST.attempt_of(n)]


UNDECLARED = [SaveOptions(parity=2), SaveOptions(array_digests=True)]


@pytest.mark.parametrize("options", UNDECLARED, ids=["parity", "digests"])
def test_what_a_strategy_does_not_declare_is_not_supported(options: SaveOptions) -> None:
    store = MemoryStore()
    with pytest.raises(UnsupportedError, match="Format megackpt version 1"):
        save(state(), store, Minimal(), options=options)
    assert store.names() == []


def test_an_object_of_another_class_is_not_a_strategy() -> None:
    with pytest.raises(DeclarationError, match="is not a save strategy"):
        save_strategy(Capabilities())  # type: ignore[arg-type]


def test_the_defaults_of_chunks_are_that_nothing_is_known() -> None:
    class Plain(Chunks):
        def describe(self, row: int) -> str:
            return ""

        def read_into(self, row: int, start: int, out: memoryview, *, verify: bool) -> None:
            pass

    chunks = Plain()
    assert (chunks.raw_ranges(), chunks.file_ranges(), chunks.is_cached()) == (None, None, False)
    assert chunks.block_bytes == 1


def test_parts_in_order_are_those_of_each_row_by_default() -> None:
    class Rows(ChunkParts):
        def __call__(self, row: int) -> Iterator[memoryview]:
            yield memoryview(bytes([row]))

    assert [b"".join(map(bytes, parts)) for parts in Rows().in_order([3, 1])] == [b"\3", b"\1"]


def test_a_directory_of_another_program_is_not_detected_by_importing_every_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    store.write("weights.bin", b"")
    monkeypatch.setattr(registry, "_format", lambda name: pytest.fail(f"{name} was imported"))
    monkeypatch.setattr(registry, "_third_parties", dict)
    assert registry.detect(store) is None


def test_a_key_that_is_the_formats_own_raises_an_error_before_anything_is_written() -> None:
    store = MemoryStore()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "content_metadata": "mine"}
    with pytest.raises(UnserializableError, match=r"content_metadata.*Rename"):
        save(state, store, "torch_dist", content_metadata={"v": 1})
    assert store.names() == []
    save(state, store, "torch_dist")  # its note shows that it is not content metadata


def test_a_format_that_stores_any_text_accepts_that_key() -> None:
    state = {"content_metadata": "mine"}
    for strategy in ("megackpt", ("zarr", 3)):
        save(state, MemoryStore(), strategy, content_metadata={"v": 1})
