"""Every format passes the suite of a third party's, and loads what earlier releases have written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import megackpt.engine.saving.preparation
from megackpt import (
    IntegrityError,
    LoadOptions,
    ShardedObject,
    load,
    load_content_metadata,
    save,
    verify,
)
from megackpt.entities import ShardedStateDict
from megackpt.errors import CheckpointError, DeclarationError, UnsupportedError
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
from megackpt.testing.identical import difference
from tests.support.checkpoints import contents
from tests.support.effort import few
from tests.support.states import flat_range, save_on_ranks, sharded
from tests.support.zarr_v1 import save_zarr_v1


class TestFormats(FormatConformance):
    examples = few(16, of=60)

    @pytest.fixture(params=[native, version_3], ids=lambda module: module.__name__)
    def format(self, request: pytest.FixtureRequest) -> Format:
        chosen: Format = request.param.FORMAT
        return chosen


class TestFormatsInMemory(TestFormats):
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
        "w": sharded("w", torch.arange(6.0)),
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
        state() | {"w": sharded("w", torch.ones(6)), "step": 1},
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


def minimal() -> SaveStrategy:
    """Return the native format through the required methods alone."""
    required = {
        name: staticmethod(getattr(save_strategy(None), name)) for name in SaveStrategy.__abstractmethods__
    }
    named = {"backend": "megackpt", "version": 1, "file_names": NATIVE}
    strategy: SaveStrategy = type("Minimal", (SaveStrategy,), required | named)()
    return strategy


def test_a_strategy_with_the_required_methods_only_saves_over_another_format() -> None:
    store, wanted = MemoryStore(), state()
    save(state(), store, "torch_dist")
    save(state(), store, minimal())
    wanted["w"].data.zero_()
    loaded = load(wanted, store)
    assert torch.equal(loaded["w"], torch.arange(6.0))
    assert (loaded["o"], loaded["step"]) == (1, 7)
    assert {NATIVE.attempt_of(n) for n in store.names()} - {None} == {minimal().committed_attempt(store)}
    assert not [n for n in store.names() if TORCH_DIST.attempt_of(n)]


UNDECLARED = [SaveOptions(parity=2), SaveOptions(array_digests=True)]


@pytest.mark.parametrize("options", UNDECLARED, ids=["parity", "digests"])
def test_what_a_strategy_does_not_declare_is_not_supported(options: SaveOptions) -> None:
    store = MemoryStore()
    with pytest.raises(UnsupportedError, match="Format megackpt version 1"):
        save(state(), store, minimal(), options=options)
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


def test_a_format_that_stores_any_text_accepts_that_key() -> None:
    state = {"content_metadata": "mine"}
    for strategy in ("megackpt", ("zarr", 3)):
        save(state, MemoryStore(), strategy, content_metadata={"v": 1})


RANKS = 2
COMMON = {"step": 1234, "lr": 3e-4, "name": "golden", "betas": [0.9, 0.95], "rng": torch.arange(4)}
CONTENT = {"layout": {"tp": 2}}
WEIGHT = torch.arange(48, dtype=torch.float32).reshape(6, 8) / 7
SCALE = torch.tensor([1.5, -2.0, 0.0, 65504.0], dtype=torch.bfloat16)
MOMENT = torch.linspace(-1, 1, 48).reshape(6, 8)
FLAT_CUT = 21  # where a data-parallel rank's share of MOMENT ends


def golden_state(rank: int) -> ShardedStateDict:
    """Declare what one of RANKS ranks holds: a tensor-parallel weight, a replicated one, flat shards."""
    start, stop = ((0, FLAT_CUT), (FLAT_CUT, 48))[rank]
    return {
        "weight": sharded("weight", WEIGHT[:, 4 * rank : 4 * rank + 4].clone(), (1, rank, 2)),
        "scale": sharded("scale", SCALE.clone(), replica_id=rank),
        "moment": flat_range("moment", MOMENT, start, stop),
        "loader": ShardedObject("loader", {"rank": rank, "seen": [1, 2, rank]}, (RANKS,), (rank,)),
        **COMMON,
    }


def write(backend: str, version: int, directory: str) -> None:
    """Write the golden checkpoint of a format."""
    save_on_ranks(RANKS, golden_state, directory, (backend, version), content_metadata=CONTENT)


FOLDER = Path(__file__).parent / "golden"
LONG = FOLDER / "megackpt-1-long"
GOLDEN = sorted(path.name for path in FOLDER.iterdir() if (path / "metadata.json").is_file() and path != LONG)
THIS_IS_THE_FORMAT = (
    "this is the format: checkpoints of version 1 are written like this, and other readers rely on it. Take "
    "the change back, or give the format a new version (docs/contributing.md, Adding a format)."
)
BLOCK = 262_144  # bytes of a block, docs/format.md; not imported, so that a change of it is noticed
LONG_ARRAY = (torch.arange(2 * BLOCK + 1000) % 251).to(torch.uint8)  # three blocks in one chunk
LONG_CUT = 140_077  # where a rank's share of LONG_FLAT ends, neither at a row nor at a block
LONG_FLAT = (torch.arange(768 * 256) % 127).to(torch.int16).reshape(768, 256)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_golden_checkpoint_loads(name: str) -> None:
    directory = FOLDER / name
    arrays = {"weight": WEIGHT, "scale": SCALE, "moment": MOMENT}
    wanted = {key: sharded(key, torch.zeros_like(a)) for key, a in arrays.items()}
    objects = [ShardedObject("loader", None, (RANKS,), (rank,)) for rank in range(RANKS)]
    loaded = load({**wanted, "loader": objects}, directory)
    assert difference(loaded.pop("loader"), [{"rank": r, "seen": [1, 2, r]} for r in range(RANKS)]) is None
    assert set(loaded) == {*arrays, *COMMON}
    for key, expected in {**arrays, **COMMON}.items():
        assert difference(loaded[key], expected, path=key) is None
    assert load_content_metadata(directory) == CONTENT


def test_there_is_a_golden_checkpoint_of_the_native_format() -> None:
    assert "megackpt-1" in GOLDEN


def long_state(rank: int) -> ShardedStateDict:
    """Declare what one of RANKS ranks holds of the long checkpoint, in addition to the golden one."""
    start, stop = ((0, LONG_CUT), (LONG_CUT, LONG_FLAT.numel()))[rank]
    return {
        **golden_state(rank),
        "long": sharded("long", LONG_ARRAY.clone(), replica_id=rank),
        "long_flat": flat_range("long_flat", LONG_FLAT, start, stop),
    }


def write_long(directory: Path) -> None:
    """Write the long checkpoint."""
    options = SaveOptions(parity=RANKS, array_digests=True)
    save_on_ranks(RANKS, long_state, directory, options=options, content_metadata=CONTENT)


def check_long(directory: Path, *, on_corrupt: Literal["error", "fallback"] = "error") -> None:
    """Load the long checkpoint at another layout and compare it, bit for bit."""
    arrays = {"weight": WEIGHT, "scale": SCALE, "moment": MOMENT, "long": LONG_ARRAY, "long_flat": LONG_FLAT}
    wanted = {key: sharded(key, torch.zeros_like(a)) for key, a in arrays.items()}
    loaded = load(wanted, directory, options=LoadOptions(on_corrupt=on_corrupt))
    for key, expected in {**arrays, **COMMON}.items():
        assert difference(loaded[key], expected, path=key) is None, THIS_IS_THE_FORMAT


def copied(directory: Path) -> Path:
    """Return a copy of the long checkpoint, which a test may damage."""
    return Path(shutil.copytree(LONG, directory / "copy"))


def test_the_long_checkpoint_loads_with_every_digest() -> None:
    try:
        check_long(LONG)
    except CheckpointError as error:
        pytest.fail(f"{THIS_IS_THE_FORMAT}\n{error}")
    assert verify(LONG, deep=True).is_whole, THIS_IS_THE_FORMAT


def test_the_long_checkpoint_is_written_again_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = json.loads((LONG / "metadata.json").read_text())["attempt"]
    monkeypatch.setattr(megackpt.engine.saving.preparation, "new_attempt", lambda: attempt)
    write_long(tmp_path / "again")
    files, again = (contents(directory) for directory in (LONG, tmp_path / "again"))
    assert sorted(again) == sorted(files), THIS_IS_THE_FORMAT
    assert [name for name in files if again[name] != files[name]] == [], THIS_IS_THE_FORMAT


@pytest.mark.parametrize("block", range(3))
def test_a_flipped_bit_is_in_a_block_of_the_format(block: int, tmp_path: Path) -> None:
    directory = copied(tmp_path)
    needle = LONG_ARRAY[:4096].numpy().tobytes()
    (file,) = [path for path in (directory / "data").iterdir() if needle in path.read_bytes()]
    data = bytearray(file.read_bytes())
    begin = data.index(needle) + block * BLOCK
    end = min(begin + BLOCK, data.index(needle) + LONG_ARRAY.numel())
    data[begin + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError) as raised:
        check_long(directory)
    assert f"the bytes {begin}:{end} of" in str(raised.value), THIS_IS_THE_FORMAT


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_lost_data_file_is_computed_from_golden_parity(rank: int, tmp_path: Path) -> None:
    directory = copied(tmp_path)
    sorted((directory / "data").iterdir())[rank].unlink()
    check_long(directory, on_corrupt="fallback")


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), sys.argv[3])
