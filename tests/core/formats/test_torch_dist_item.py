"""One tensor as torch.save stores it: written without torch, and found again by its first bytes."""

from __future__ import annotations

import io
import math
import zipfile

import pytest
import torch

from megackpt.formats.torch_dist import item as items
from megackpt.formats.torch_dist.item import HEAD_BYTES, frame_of, locate, stream
from megackpt.metadata import DTYPES
from tests.support.states import bits

SHAPES = [(), (0,), (2, 0, 3), (5,), (2, 3), (1, 4, 1), (130, 257)]


def raw_bytes(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    high = 2 if dtype == "bool" else 256
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    return torch.randint(0, high, (nbytes,), dtype=torch.uint8, generator=generator)


def written(dtype: str, shape: tuple[int, ...], raw: torch.Tensor) -> bytes:
    return b"".join(stream(frame_of(dtype, shape), [memoryview(raw.numpy())]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_what_is_written_for_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    raw = raw_bytes(dtype, shape)
    data = written(dtype, shape, raw)
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert (tuple(loaded.shape), loaded.dtype) == (shape, getattr(torch, dtype))
    assert bits(loaded) == bytes(raw.numpy())
    assert len(data) == frame_of(dtype, shape).length
    assert len(frame_of(dtype, shape).head) % 64 == 0
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bytes_are_found_in_what_torch_and_we_have_written(dtype: str, shape: tuple[int, ...]) -> None:
    raw = raw_bytes(dtype, shape)
    ours = written(dtype, shape, raw)
    tensor = torch.load(io.BytesIO(ours), weights_only=True)
    out = io.BytesIO()
    torch.save(tensor, out)
    for data in (ours, out.getvalue()):
        at = locate(data[:HEAD_BYTES], length=len(data), dtype=dtype, shape=shape)
        assert at is not None
        assert data[at : at + len(raw)] == bytes(raw.numpy())


@pytest.mark.parametrize("numel", [64, 1000])
def test_an_item_of_a_size_that_needs_zip64_is_right(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(items, "ZIP64_FROM", 64)  # as if these sizes and positions did not fit into 32 bits
    raw = raw_bytes("uint8", (numel,))
    data = written("uint8", (numel,), raw)
    assert len(data) == frame_of("uint8", (numel,)).length
    assert bits(torch.load(io.BytesIO(data), weights_only=True)) == bytes(raw.numpy())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.getinfo("archive/data/0").file_size == numel
    at = locate(data[:HEAD_BYTES], length=len(data), dtype="uint8", shape=(numel,))
    assert at is not None
    assert data[at : at + numel] == bytes(raw.numpy())


def test_the_length_of_an_item_of_more_than_4_gib_counts_its_64_bit_fields() -> None:
    subdirectory, above = (frame_of("float32", (n,)) for n in (2**29, 2**30))
    assert subdirectory.length - subdirectory.nbytes - len(subdirectory.head) == len(subdirectory.tail(0))
    assert above.length - above.nbytes - len(above.head) == len(above.tail(0))
    # Descriptor 8 more, directory entries of data/0 and version with an extra field, zip64 end and locator.
    assert len(above.tail(0)) - len(subdirectory.tail(0)) == 8 + (4 + 16) + (4 + 8) + 56 + 20
    assert len(above.head) % 64 == 0


def unusual() -> dict[str, torch.Tensor]:
    whole = torch.arange(12.0).reshape(3, 4)
    return {
        "transposed": whole.T,
        "columns": whole[:, 1:],
        "expanded": torch.arange(4.0).expand(3, 4),
        "parameter": torch.nn.Parameter(whole.clone()),
        "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
    }


@pytest.mark.parametrize("name", unusual())
def test_a_tensor_that_is_not_plainly_row_major_is_not_found(name: str) -> None:
    tensor = unusual()[name]
    out = io.BytesIO()
    torch.save(tensor, out)
    data = out.getvalue()
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert locate(data[:HEAD_BYTES], length=len(data), dtype=dtype, shape=tuple(tensor.shape)) is None


def test_rows_of_a_larger_storage_are_found_where_they_begin() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    out = io.BytesIO()
    torch.save(whole[1:], out)
    data = out.getvalue()
    at = locate(data[:HEAD_BYTES], length=len(data), dtype="float32", shape=(2, 4))
    assert at is not None
    assert data[at : at + 32] == bits(whole[1:])


def test_another_byte_order_dtype_or_shape_is_not_found() -> None:
    data = written("float32", (2, 3), raw_bytes("float32", (2, 3)))
    head = data[:HEAD_BYTES]
    assert locate(head, length=len(data), dtype="float32", shape=(2, 3)) is not None
    assert locate(head, length=len(data), dtype="int32", shape=(2, 3)) is None
    assert locate(head, length=len(data), dtype="float32", shape=(3, 2)) is None
    assert locate(head, length=len(head) - 400, dtype="float32", shape=(2, 3)) is None
    swapped = head.replace(b"little", b"bigend")
    assert locate(swapped, length=len(data), dtype="float32", shape=(2, 3)) is None


def test_damage_anywhere_in_the_head_is_survived() -> None:
    out = io.BytesIO()
    torch.save(torch.arange(6.0), out)
    data = out.getvalue()
    for position in range(600):
        for value in (0, 255, data[position] ^ 1):
            damaged = bytearray(data[:HEAD_BYTES])
            damaged[position] = value
            at = locate(bytes(damaged), length=len(data), dtype="float32", shape=(6,))
            assert at is None or 0 <= at <= len(data) - 24
