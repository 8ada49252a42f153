"""Pickles that want to run something, and files that are not what they say: rejected, with the name of it."""

from __future__ import annotations

import argparse
import collections
import io
import logging
import os
import pickle
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megackpt import (
    CheckpointError,
    FormatError,
    LoadOptions,
    ShardedObject,
    StorageError,
    load,
    load_plain_tensors,
    save,
)
from megackpt.codec.stand_ins import ForeignMember
from megackpt.errors import UnserializableError
from megackpt.formats import safe_pickle
from megackpt.formats.torch_dist import item_chunks
from megackpt.formats.torch_dist.item_chunks import _row_major
from megackpt.formats.torch_dist.metadata_reader import Item
from tests.support.dcp_alone import ALONE
from tests.support.effort import few
from tests.support.states import PickledCall, sharded
from tests.system.attacks.opcodes import zipped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What stock DCP writes of a tensor and an object."""
    dcp.save({"w": torch.arange(6.0), "o": "text"}, checkpoint_id=tmp_path / "c", **ALONE)
    return tmp_path / "c"


def request() -> dict[str, Any]:
    return {
        "w": sharded("w", torch.zeros(6)),
        "o": ShardedObject("o", None, (1,), (0,)),
    }


def metadata_of(directory: Path) -> Metadata:
    return pickle.loads((directory / ".metadata").read_bytes())


def put(directory: Path, metadata: Any) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def with_evil_metadata(directory: Path, marker: Path) -> None:
    metadata = metadata_of(directory)
    metadata.planner_data = {"w": PickledCall(os.mkdir, str(marker))}
    put(directory, metadata)


def with_evil_item(directory: Path, marker: Path, fqn: str) -> None:
    torch.save(PickledCall(os.mkdir, str(marker)), directory / "evil.distcp")
    metadata = metadata_of(directory)
    (info,) = [v for k, v in metadata.storage_data.items() if k.fqn == fqn]
    info.relative_path, info.offset = "evil.distcp", 0
    info.length = (directory / "evil.distcp").stat().st_size
    put(directory, metadata)


def with_evil_common(directory: Path, marker: Path) -> None:
    torch.save({"step": PickledCall(os.mkdir, str(marker))}, directory / "common.pt")


with_evil_object = partial(with_evil_item, fqn="o")
with_evil_tensor = partial(with_evil_item, fqn="w")
EVIL = [with_evil_metadata, with_evil_object, with_evil_tensor, with_evil_common]


@pytest.mark.parametrize("spoil", EVIL)
def test_a_pickle_that_names_a_function_raises_an_error_with_its_name_and_is_not_run(
    checkpoint: Path, tmp_path: Path, spoil: Any
) -> None:
    spoil(checkpoint, tmp_path / "ran")
    with pytest.raises(FormatError, match=r"names posix\.mkdir, which.*not loaded.*allow_unsafe_pickle=True"):
        load(request(), checkpoint)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("spoil", [with_evil_metadata, with_evil_object, with_evil_common])
def test_allow_unsafe_pickle_lets_it_run_and_warns_once(
    checkpoint: Path, tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    spoil(checkpoint, tmp_path / "ran")
    with caplog.at_level(logging.WARNING):
        loaded = load(request(), checkpoint, options=LoadOptions(allow_unsafe_pickle=True))
    assert (tmp_path / "ran").is_dir()
    assert torch.equal(loaded["w"], torch.arange(6.0))
    warned = [r for r in caplog.records if "may run any code" in r.getMessage()]
    assert len(warned) == 1
    assert str(checkpoint) in warned[0].getMessage()


def test_common_state_of_another_class_is_an_error(checkpoint: Path) -> None:
    torch.save([1, 2], checkpoint / "common.pt")
    with pytest.raises(FormatError, match="common state is a list, not a dict"):
        load(request(), checkpoint)


def test_a_class_that_the_user_has_allowed_is_loaded_and_stays_allowed(checkpoint: Path) -> None:
    torch.save({"d": Fraction(1)}, checkpoint / "common.pt")
    with pytest.raises(FormatError, match=r"names \S*test_torch_dist_errors\.Fraction"):
        load(request(), checkpoint)
    with torch.serialization.safe_globals([Fraction, complex]):  # complex is allowed by us, too
        allowed = set(torch.serialization.get_safe_globals())
        assert load(request(), checkpoint)["d"].value == 1
        assert set(torch.serialization.get_safe_globals()) == allowed


class Fraction:
    """A class of a user."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_harmless_classes_of_common_checkpoints_are_loaded(tmp_path: Path) -> None:
    value = {
        "args": argparse.Namespace(lr=0.1, sizes=(1, 2)),
        "more": types.SimpleNamespace(a=[1]),
        "numbers": [np.float32(2.5), np.int64(3), np.bool_(True), np.arange(3, dtype=np.uint32)],
        "text": np.array(["a", "bc"]),
        "random": np.random.default_rng(0).random(3),
        "path": Path("/a/b"),
        "stream": io.BytesIO(b"abc"),
        "counts": collections.Counter(a=1),
        "ordered": collections.OrderedDict(b=1),
        "set": frozenset({1, 2}),
        "bytes": b"x",
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }
    allowed = set(torch.serialization.get_safe_globals())
    data = safe_pickle.save_value(value, path="p")
    loaded = safe_pickle.load_value(data, where="w")
    assert loaded["args"] == value["args"]
    assert loaded["stream"].getvalue() == b"abc"
    for key in ("more", "path", "counts", "ordered", "set", "bytes", "device", "dtype"):
        assert loaded[key] == value[key], key
        assert type(loaded[key]) is type(value[key])
    assert all(np.array_equal(a, b) for a, b in zip(loaded["numbers"], value["numbers"], strict=True))
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_enumerations_of_megatron_have_stand_ins_where_it_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.enums", raising=False)
    # The pickle of an enumeration of a module that is not there: GLOBAL, 1, REDUCE.
    pickled = zipped(b"\x80\x02cmegatron.core.enums\nModelType\nK\x01\x85R.")
    # If another test has imported Megatron-Core, torch's list has its enumerations.
    allowed = torch.serialization.get_safe_globals()
    of_megatron = [c for c in allowed if getattr(c, "__module__", "") == "megatron.core.enums"]
    torch._weights_only_unpickler._remove_safe_globals(of_megatron)
    try:
        loaded = safe_pickle.load_value(pickled, where="w")
    finally:
        torch.serialization.add_safe_globals(of_megatron)
    assert loaded == ForeignMember("megatron.core.enums", "ModelType", None, 1)


def test_what_could_not_be_loaded_again_raises_an_error_at_save_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UnserializableError, match=r"rng/state: .*Fraction, which torch\.load\(weights_only"):
        safe_pickle.save_value({"a": Fraction(1)}, path="rng/state")
    with pytest.raises(UnserializableError, match="rng: a function cannot be pickled"):
        safe_pickle.save_value(lambda: 0, path="rng")
    state = {"o": ShardedObject("rng", [Fraction(2)], (1,), (0,))}
    with pytest.raises(UnserializableError, match=r"rng: .*Fraction"):
        save(state, tmp_path / "c", "torch_dist")
    assert not (tmp_path / "c").exists() or not any((tmp_path / "c").iterdir())


Change = Callable[[Metadata], object]


def edit_files(**fields: Any) -> Change:
    """Set fields of what is said of all items."""

    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


def set_chunk(offsets: Any, sizes: Any) -> Change:
    def change(metadata: Metadata) -> None:
        (chunk,) = metadata.state_dict_metadata["w"].chunks
        chunk.offsets, chunk.sizes = offsets, sizes

    return change


def set_size(*size: int) -> Change:
    return lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", size)


def add_chunk(metadata: Metadata, start: int) -> None:
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks.append(type(chunks[0])(torch.Size([start]), torch.Size([3])))


def overlapping(metadata: Metadata) -> None:
    add_chunk(metadata, 1)
    index = next(k for k in metadata.storage_data if k.fqn == "w")
    metadata.storage_data[type(index)("w", (1,))] = metadata.storage_data[index]


WRONG = [
    (edit_files(relative_path="../../secret"), StorageError, "has the part '..'"),
    (edit_files(relative_path="/etc/passwd"), StorageError, "is absolute"),
    (edit_files(relative_path="gone.distcp"), CheckpointError, "gone.distcp"),
    (edit_files(relative_path=7), FormatError, "its position in a file is malformed"),
    (edit_files(offset=-8, length=100), FormatError, "no file has 100 bytes at -8"),
    (edit_files(offset=0, length=2**62), FormatError, "no file has"),
    (edit_files(offset=0, length=2**40), FormatError, "before the end of"),
    (edit_files(offset="0", length=8), FormatError, "malformed"),
    (set_chunk((0,), (7,)), FormatError, "does not lie in its array|chunks overlap"),
    (set_chunk((-1,), (6,)), FormatError, "a shape or offset in it is none"),
    (set_chunk("abc", (6,)), FormatError, "a shape or offset in it is none"),
    (set_chunk((0,), (3,)), FormatError, "has no data for some elements|holds|no file is named"),
    (set_size(2**61), FormatError, "a shape or offset in it is none"),
    (set_size(2**40, 2**40), FormatError, "no array can have the shape"),
    (lambda metadata: setattr(metadata, "storage_data", {}), FormatError, "no file is named"),
    (lambda metadata: setattr(metadata, "state_dict_metadata", [1, 2]), FormatError, "no tables of keys"),
    (lambda metadata: add_chunk(metadata, 0), FormatError, "two chunks begin at"),
    (overlapping, FormatError, "chunks overlap"),
    (edit_files(transform_descriptors=["stream.zstd/1"]), FormatError, "went through .*zstd"),
]


@pytest.mark.parametrize(("change", "error", "text"), WRONG)
def test_metadata_that_cannot_be_raises_an_error(
    checkpoint: Path, change: Any, error: type[Exception], text: str
) -> None:
    (checkpoint.parent.parent / "secret").write_bytes(b"x" * 4096)
    metadata = metadata_of(checkpoint)
    change(metadata)
    put(checkpoint, metadata)
    with pytest.raises(error, match=text):
        load(request(), checkpoint)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # the memo's entry 2**31
        b"\x80\x04Np4000000000\n.",
        b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00abc.",  # 64 GiB of bytes, of which 3 are there
        b"\x80\x04\x8e\xff\xff\xff\xff\x0f\x00\x00\x00abc.",
        b"\x80\x04]",
    ],
)
def test_a_pickle_that_would_take_more_memory_than_it_has_bytes_raises_an_error(
    checkpoint: Path, pickled: bytes
) -> None:
    (checkpoint / ".metadata").write_bytes(pickled)
    with pytest.raises(FormatError, match=r"memo is larger than the pickle|has no end"):
        load(request(), checkpoint)


def test_a_link_out_of_the_checkpoint_raises_an_error(checkpoint: Path, tmp_path: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        load(request(), checkpoint)


def test_a_directory_without_metadata_raises_an_error(checkpoint: Path) -> None:
    (checkpoint / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (checkpoint / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"has no \.metadata"):
        load(request(), checkpoint)


def test_damaged_metadata_is_an_error_of_ours_or_loads_what_was_saved(checkpoint: Path) -> None:
    whole = (checkpoint / ".metadata").read_bytes()
    generator = random.Random(11)
    rejected = 0
    tries = few(150, of=700)
    for _ in range(tries):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 3)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        if generator.random() < 0.1:
            del damaged[generator.randrange(len(damaged)) :]
        (checkpoint / ".metadata").write_bytes(damaged)
        try:
            load_plain_tensors(checkpoint)
        except CheckpointError:
            rejected += 1
    print(f"{rejected} of {tries} damaged files rejected")
    assert rejected > tries // 3


def test_a_tensor_that_repeats_its_bytes_is_read_up_to_the_limit_and_not_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(item_chunks, "_REPEATED_BYTES", 4096)

    def repeated(count: int) -> memoryview:
        item = Item(name="w", file="0.distcp", offset_bytes=0, nbytes=700, dtype="float32", shape=(count,))
        return _row_major(torch.ones(1).expand(count), item, "here")

    assert repeated(1024) == torch.ones(1024).numpy().tobytes()
    with pytest.raises(FormatError, match="here: it repeats its 700 bytes over 4,100") as raised:
        repeated(1025)
    assert (raised.value.key, raised.value.path) == ("w", "0.distcp")
