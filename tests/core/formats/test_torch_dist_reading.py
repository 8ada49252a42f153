"""What torch.distributed.checkpoint and Megatron-Core write, read at any layout; items of one tensor."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megackpt import (
    FormatError,
    ShardedObject,
    ShardedTensor,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
)
from megackpt.formats.torch_dist import item as items
from megackpt.formats.torch_dist.item import HEAD_BYTES, frame_of, locate, stream
from megackpt.plans.metadata import DTYPES
from megackpt.run import remove_sharded_tensors
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
from tests.support.dcp_alone import ALONE
from tests.support.states import bits, random_bits, sharded, torch_saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def columns(key: str, dtype: torch.dtype, shape: tuple[int, ...], rank: int, ranks: int) -> ShardedTensor:
    local = (shape[0], shape[1] // ranks)
    return sharded(key, torch.zeros(local, dtype=dtype), (1, rank, ranks))


def save_plain(directory: Path, state: dict[str, Any], **options: Any) -> None:
    writer = dcp.FileSystemWriter(directory, **options)
    dcp.save(state, storage_writer=writer, **ALONE)


def position_in(data: bytes, dtype: str, shape: tuple[int, ...]) -> int | None:
    """Where the elements begin in an item, by its head."""
    return locate(data[:HEAD_BYTES], length=len(data), dtype=dtype, shape=shape)


class Writer:
    """Writes a checkpoint item by item, as any other program may."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.metadata = Metadata({}, storage_data={})
        self._data = b""

    def object(self, name: str, value: Any) -> None:
        self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
        self._put(MetadataIndex(name), value)

    def array(self, key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        self.metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(shape), []
        )

    def chunk(self, key: str, offsets: tuple[int, ...], tensor: torch.Tensor) -> None:
        chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
        self.metadata.state_dict_metadata[key].chunks.append(chunk)
        self._put(MetadataIndex(key, offsets), tensor)

    def _put(self, index: MetadataIndex, value: Any) -> None:
        data = torch_saved(value)
        self.metadata.storage_data[index] = _StorageInfo("data.distcp", len(self._data), len(data))
        self._data += data

    def finish(self) -> Path:
        (self.directory / "data.distcp").write_bytes(self._data)
        (self.directory / ".metadata").write_bytes(pickle.dumps(self.metadata))
        return self.directory


def test_a_plain_nested_state_dict_is_loaded_by_its_flat_keys(tmp_path: Path) -> None:
    weight, bias = torch.randn(4, 6), torch.randn(3).bfloat16()
    state = {"model": {"layer": {"weight": weight}, "bias": bias}, "epoch": 3, "names": ["a", ("b", 1)]}
    save_plain(tmp_path / "c", state)
    for rank in range(2):
        request = {
            "w": columns("model.layer.weight", torch.float32, (4, 6), rank, 2),
            "epoch": ShardedObject("epoch", None, (1,), (0,)),
        }
        loaded = load(request, tmp_path / "c")
        assert torch.equal(loaded["w"], weight[:, rank * 3 : rank * 3 + 3])
        assert loaded["epoch"] == 3
    assert torch.equal(load_plain_tensors(tmp_path / "c")["model.bias"], bias)
    assert load_common_state_dict(tmp_path / "c") == {}
    assert load_content_metadata(tmp_path / "c") is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_that_dcp_writes_is_loaded_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    tensor = random_bits(dtype, (2, 3))
    save_plain(tmp_path / "c", {"t": tensor, "scalar": tensor[0, 0].clone(), "none": tensor[:0].clone()})
    loaded = load_plain_tensors(tmp_path / "c")
    assert bits(loaded["t"]) == bits(tensor)
    assert loaded["scalar"].shape == ()
    assert (loaded["none"].shape, loaded["none"].dtype) == ((0, 3), tensor.dtype)


def test_items_that_are_not_row_major_are_loaded_all_the_same(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": whole.T,
        "columns": whole[:, 1:4],
        "expanded": whole[0].expand(3, 6),
        "parameter": torch.nn.Parameter(whole.clone()),
        "conjugate": torch.complex(whole[0], whole[1]).conj(),
        "channels_last": torch.arange(96.0).reshape(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }
    writer = Writer(tmp_path / "c")
    for key, tensor in state.items():
        writer.array(key, tuple(tensor.shape), tensor.dtype)
        writer.chunk(key, (0,) * tensor.ndim, tensor)
    loaded = load_plain_tensors(writer.finish())
    assert set(loaded) == set(state)
    for key, tensor in state.items():
        assert torch.equal(loaded[key], tensor), key


def test_an_item_with_another_tensor_than_its_metadata_raises_an_error(tmp_path: Path) -> None:
    for tensor in (torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(4).to_sparse()):
        writer = Writer(tmp_path / f"{tensor.dtype}{len(tensor)}{tensor.is_sparse}")
        writer.array("w", (4,))
        writer.chunk("w", (0,), tensor)
        writer.metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([4])
        with pytest.raises(FormatError, match=r"not a dense tensor \(4,\) of torch.float32"):
            load_plain_tensors(writer.finish())


def test_what_dcp_writes_as_safetensors_is_loaded(tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 4), "b": torch.arange(5), "o": "text"}
    if not hasattr(filesystem, "SerializationFormat"):
        pytest.skip("DCP of this torch does not write safetensors")
    save_plain(tmp_path / "c", state, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    loaded = load_plain_tensors(tmp_path / "c")
    assert torch.equal(loaded["a"], state["a"])
    assert torch.equal(loaded["b"], state["b"])
    request = {"o": ShardedObject("o", None, (1,), (0,))}
    assert load(request, tmp_path / "c")["o"] == "text"


def test_objects_of_megatron_form_arrays_and_plain_ones_stand_alone(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c")
    for rank in range(3):
        writer.object(f"rng/shard_0.{rank}_1.3", [{"rank": rank}])
    writer.object("old/shard_0.1_1", ["old"])  # without the last extent
    writer.object("plain", ["a list"])
    directory = writer.finish()
    shapes = {o.key: o.global_shape for o in load_sharded_metadata(directory).values()}
    assert shapes == {"rng": (1, 3), "old": (1, 2), "plain": (1,)}
    request = {
        "mine": ShardedObject("rng", None, (1, 3), (0, 2)),
        "old": ShardedObject("old", None, (1, 2), (0, 1)),
        "plain": ShardedObject("plain", None, (1,), (0,)),
    }
    assert load(request, directory) == {"mine": {"rank": 2}, "old": "old", "plain": ["a list"]}


def test_objects_whose_names_contradict_each_other_can_still_be_loaded_one_by_one(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c")
    writer.object("a/shard_0_2", ["two"])
    writer.object("a/shard_0_3", ["three"])
    writer.array("b", (2,))
    writer.chunk("b", (0,), torch.ones(2))
    writer.object("b/shard_0_1", ["with a tensor"])
    directory = writer.finish()
    request = {
        "a": ShardedObject("a/shard_0_3", None, (1,), (0,)),
        "b": ShardedObject("b/shard_0_1", None, (1,), (0,)),
        "t": sharded("b", torch.zeros(2)),
    }
    loaded = load(request, directory)
    assert (loaded["a"], loaded["b"], loaded["t"].tolist()) == ("three", "with a tensor", [1.0, 1.0])


def test_common_state_is_read_from_common_pt_or_from_its_object(tmp_path: Path) -> None:
    common = {"step": 7, "content_metadata": {"sharding": "x"}}
    old, new = Writer(tmp_path / "old"), Writer(tmp_path / "new")
    new.object("common_state/shard_0_1", [common])
    torch.save(common, old.finish() / "common.pt")
    new.finish()
    for directory in (tmp_path / "old", tmp_path / "new"):
        assert load_common_state_dict(directory) == {"step": 7}
        assert load_content_metadata(directory) == {"sharding": "x"}
        assert load_sharded_metadata(directory) == {}


@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 1, 4, 11, 12)])
def test_arrays_that_megatron_has_flattened_by_fragments_load_at_any_layout(
    tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    # Two layers, each cut into two halves of its rows: an array [2, 4, 6] is stored as [2, 2, 1, 12].
    whole = torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(2, 4, 6)
    writer = Writer(tmp_path / "c")
    writer.array("w", (2, 2, 1, 12))
    writer.metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 4, 6)}, "other": {}}
    for layer in range(2):
        for half in range(2):
            flat = whole[layer, half * 2 : half * 2 + 2].reshape(-1)
            for start, stop in pairwise(cuts):
                chunk = flat[start:stop].reshape(1, 1, 1, -1).clone()
                writer.chunk("w", (layer, half, 0, start), chunk)
    directory = writer.finish()
    assert load_sharded_metadata(directory)["w"].global_shape == (2, 4, 6)
    assert torch.equal(load_plain_tensors(directory)["w"], whole)
    part = sharded("w", torch.zeros(2, 4, 3), (2, 1, 2))
    assert torch.equal(load({"w": part}, directory)["w"], whole[:, :, 3:])
    flat_part = ShardedTensor(
        "w", torch.zeros(9), torch.float32, (4, 6), (2, 4, 6), (1, 0, 0), (2, 1, 1),
        prepend_axis_num=1, flattened_range=slice(7, 16),
    )  # fmt: skip
    assert torch.equal(load({"w": flat_part}, directory)["w"], whole[1].reshape(-1)[7:16])


@pytest.mark.parametrize(
    ("stored", "original", "text"),
    [
        ((2, 2, 1, 12), (2, 5, 6), "cannot be stored as"),
        ((2, 2, 12), (2, 4, 6), "cannot be stored as"),
        ((2, 2, 1, 11), (2, 4, 6), "cannot be stored as"),
        ((2, 2, 1, 12), ("2", 4, 6), "is none"),
    ],
)
def test_fragments_that_do_not_fit_their_array_raise_an_error(
    tmp_path: Path, stored: tuple[int, ...], original: Any, text: str
) -> None:
    writer = Writer(tmp_path / "c")
    writer.array("w", stored)
    writer.metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": original}}
    writer.chunk("w", (0,) * len(stored), torch.zeros((1,) * len(stored)))
    with pytest.raises(FormatError, match=text):
        load_plain_tensors(writer.finish())


def test_a_chunk_that_is_listed_twice_is_one_chunk(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "c")
    writer.array("w", (4,))
    for _ in range(2):
        writer.chunk("w", (0,), torch.ones(2))
    writer.chunk("w", (2,), torch.ones(2))
    assert load_plain_tensors(writer.finish())["w"].tolist() == [1.0] * 4


def test_a_slice_of_a_large_chunk_reads_about_its_own_bytes(tmp_path: Path) -> None:
    whole = torch.randn(1024, 1024)
    save_plain(tmp_path / "c", {"w": whole, "unasked": torch.zeros(1 << 20)})
    rows = sharded("w", torch.zeros(16, 1024), (0, 5, 64))
    store = FaultyStore(LocalStore(tmp_path / "c"), kinds={"read_into"})
    assert torch.equal(load({"w": rows}, store)["w"], whole[80:96])
    sizes = sorted(operation.nbytes for operation in store.operations)
    assert sizes == [HEAD_BYTES, 16 * 1024 * 4]


def test_a_dtype_that_we_lack_hinders_only_who_asks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(tmp_path / "c")
    writer.array("q", (2,), torch.complex32)
    writer.array("w", (2,))
    writer.chunk("w", (0,), torch.ones(2))
    directory = writer.finish()
    wanted = sharded("w", torch.zeros(2))
    assert load({"w": wanted}, directory)["w"].tolist() == [1.0, 1.0]
    assert "'q' has dtype complex32, which cannot be loaded" in caplog.text
    with pytest.raises(FormatError, match=r"'q'.*complex32"):
        load_plain_tensors(directory)


def test_arrays_are_removed_from_a_checkpoint_that_others_wrote(tmp_path: Path) -> None:
    state = {"keep": torch.ones(3), "drop": {"a": torch.zeros(2), "b": 5}}
    save_plain(tmp_path / "c", state, single_file_per_rank=False)
    before = set(tmp_path.rglob("*.distcp"))
    remove_sharded_tensors(tmp_path / "c", "drop")
    assert set(load_plain_tensors(tmp_path / "c")) == {"keep"}
    assert len(before) - len(set(tmp_path.rglob("*.distcp"))) == 2
    loaded = {"keep": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "c", **ALONE)
    assert loaded["keep"].tolist() == [1.0] * 3


def test_a_manifest_of_megatron_needs_nothing_more(tmp_path: Path) -> None:
    save_plain(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "c" / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    assert load_plain_tensors(tmp_path / "c")["w"].tolist() == [1.0, 1.0]


SHAPES = [(), (0,), (2, 0, 3), (5,), (2, 3), (1, 4, 1), (130, 257)]


def written(tensor: torch.Tensor) -> bytes:
    frame = frame_of(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return b"".join(stream(frame, [memoryview(bits(tensor))]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_what_is_written_and_the_bytes_are_found_in_it_and_in_what_torch_writes(
    dtype: str, shape: tuple[int, ...]
) -> None:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    tensor, frame = random_bits(dtype, shape), frame_of(dtype, shape)
    data = written(tensor)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (tuple(loaded.shape), loaded.dtype, bits(loaded)) == (shape, tensor.dtype, bits(tensor))
    assert len(data) == frame.length
    assert len(frame.head) % 64 == 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    for item in (data, torch_saved(loaded)):
        at = position_in(item, dtype, shape)
        assert at is not None
        assert item[at : at + tensor.nbytes] == bits(tensor)


@pytest.mark.parametrize("numel", [64, 1000])
def test_an_item_of_a_size_that_needs_zip64_is_right(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(items, "ZIP64_FROM", 64)  # as if these sizes and positions did not fit into 32 bits
    tensor = random_bits("uint8", (numel,))
    data = written(tensor)
    assert len(data) == frame_of("uint8", (numel,)).length
    assert torch.equal(torch.load(io.BytesIO(data), weights_only=True), tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("archive/data/0").file_size == numel
    at = position_in(data, "uint8", (numel,))
    assert at is not None
    assert data[at : at + numel] == bits(tensor)


def test_the_length_of_an_item_of_more_than_4_gib_counts_its_64_bit_fields() -> None:
    subdirectory, above = (frame_of("float32", (n,)) for n in (2**29, 2**30))
    assert subdirectory.length - subdirectory.nbytes - len(subdirectory.head) == len(subdirectory.tail(0))
    assert above.length - above.nbytes - len(above.head) == len(above.tail(0))
    # Descriptor 8 more, directory entries of data/0 and version with an extra field, zip64 end and locator.
    assert len(above.tail(0)) - len(subdirectory.tail(0)) == 8 + (4 + 16) + (4 + 8) + 56 + 20
    assert len(above.head) % 64 == 0


def test_rows_of_a_larger_storage_are_found_where_they_begin() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    data = torch_saved(whole[1:])
    at = position_in(data, "float32", (2, 4))
    assert at is not None
    assert data[at : at + 32] == bits(whole[1:])


def test_another_byte_order_dtype_or_shape_is_not_found() -> None:
    data = written(random_bits("float32", (2, 3)))
    head = data[:HEAD_BYTES]
    assert position_in(data, "float32", (2, 3)) is not None
    assert position_in(data, "int32", (2, 3)) is None
    assert position_in(data, "float32", (3, 2)) is None
    assert locate(head, length=len(head) - 400, dtype="float32", shape=(2, 3)) is None
    swapped = head.replace(b"little", b"bigend")
    assert locate(swapped, length=len(data), dtype="float32", shape=(2, 3)) is None


def test_damage_anywhere_in_the_head_is_survived() -> None:
    data = torch_saved(torch.arange(6.0))
    for position in range(600):
        for value in (0, 255, data[position] ^ 1):
            damaged = bytearray(data[:HEAD_BYTES])
            damaged[position] = value
            at = locate(bytes(damaged), length=len(data), dtype="float32", shape=(6,))
            assert at is None or 0 <= at <= len(data) - 24
