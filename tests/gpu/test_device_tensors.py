"""Tensors on a CUDA device: saved and loaded bit for bit, in order with what the device's streams do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import Checkpointer, KeyRule, LoadOptions, Policy, SaveOptions, ShardedTensor, load, save
from megackpt.engine.data.device_copies import COMMON_BUFFERS, HostBuffers, host_parts, to_host
from megackpt.engine.data.tensor_bytes import as_bits, byte_view, parts_of
from megackpt.metadata import DTYPES
from megackpt.storage.rawio import BUFFER_BYTES

pytestmark = pytest.mark.gpu

FORMATS = ["megackpt", "torch_dist"]
LONG = 3 * BUFFER_BYTES // 4 + 1000  # float32 elements: longer than two buffers
CYCLES = 1_000_000_000  # for which a stream is kept busy: about 0.6 s


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, in host memory."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    raw_bytes = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return raw_bytes.view(dtype)


def on_host() -> dict[str, torch.Tensor]:
    """Tensors of all dtypes and of many layouts, in host memory."""
    torch.manual_seed(0)
    made = {name: random((7, 11), getattr(torch, name)) for name in DTYPES}
    long = random((LONG,), torch.float32)
    return made | {
        "long": long,
        "long rows": random((3, LONG), torch.bfloat16),
        "transposed": random((1100, 2300), torch.float32).t(),
        "every third": random((900, 3000), torch.bfloat16)[:, ::3],
        "cut": random((2000, 1500), torch.int32)[3:-5, 7:-2],
        "permuted complex": random((40, 50, 60), torch.complex128).permute(2, 0, 1),
        "conjugate": random((30, 20), torch.complex64).conj(),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 5),
        "expanded": torch.rand(1, 700).expand(900, 700),
    }


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device with the same elements and strides."""
    if tensor.is_conj():
        return like(tensor.conj()).conj()
    if 0 in tensor.stride():
        return tensor[:1].cuda().expand(tensor.shape)
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return moved.copy_(tensor)


def declared(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    bits = [as_bits(tensor.cpu().contiguous()) for tensor in (first, second)]
    return first.shape == second.shape and byte_view(bits[0]) == byte_view(bits[1])


@contextmanager
def busy_stream() -> Iterator[None]:
    """Within the block the current stream is one of its own that has much to do."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        yield


@pytest.mark.parametrize("backend", FORMATS)
@pytest.mark.parametrize("part_bytes", [SaveOptions().part_bytes, 1000])
def test_what_is_saved_from_a_device_is_loaded_on_the_host(
    tmp_path: Path, backend: str, part_bytes: int
) -> None:
    host = on_host()
    device = {key: like(tensor) for key, tensor in host.items()}
    host_too = {"copy of " + key: host[key] for key in ("long", "float32", "transposed")}
    # Rows in host memory stand between those on the device.
    mixed = dict(sorted((device | host_too).items(), key=lambda item: item[0][::-1]))
    save(declared(mixed), tmp_path / "c", (backend, 1), options=SaveOptions(part_bytes=part_bytes))
    targets = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in mixed.items()}
    load(declared(targets), tmp_path / "c")
    for key, target in targets.items():
        assert is_same(target, host[key.removeprefix("copy of ")]), key


@pytest.mark.parametrize("backend", FORMATS)
def test_what_is_saved_on_the_host_is_loaded_to_a_device(tmp_path: Path, backend: str) -> None:
    host = {key: t for key, t in on_host().items() if key not in ("conjugate", "expanded")}
    save(declared(host), tmp_path / "c", (backend, 1))
    targets = {key: like(torch.zeros_like(t)) for key, t in host.items()}
    load(declared(targets), tmp_path / "c")
    for key, target in targets.items():
        assert target.is_cuda
        assert is_same(target, host[key]), key


def test_values_that_are_converted_are_those_that_the_host_makes_of_them(tmp_path: Path) -> None:
    stored = torch.randn(500, 300)
    save(declared({"w": stored}), tmp_path / "c")
    cast = LoadOptions(rules=(KeyRule(keys="*", cast=Policy.IGNORE),))
    targets = [torch.zeros(500, 300, dtype=torch.bfloat16, device=device) for device in ("cpu", "cuda")]
    for target in targets:
        load(declared({"w": target}), tmp_path / "c", options=cast)
    assert is_same(*targets)


@pytest.mark.parametrize("backend", FORMATS)
def test_a_tensor_still_being_computed_is_saved_complete(tmp_path: Path, backend: str) -> None:
    values = random((LONG,), torch.float32).cuda()
    tensor, strided = torch.zeros_like(values), torch.zeros(2 * LONG, device="cuda")[::2]
    torch.cuda.synchronize()
    with busy_stream():
        tensor.copy_(values)
        strided.copy_(values)
        save(declared({"w": tensor, "strided": strided}), tmp_path / "c", (backend, 1))
    for key in ("w", "strided"):
        target = torch.zeros(LONG)
        load(declared({key: target}), tmp_path / "c")
        assert is_same(target, values)


def test_a_load_comes_after_what_the_stream_was_doing_and_before_what_follows(tmp_path: Path) -> None:
    values = random((LONG,), torch.float32)
    save(declared({"w": values}), tmp_path / "c")
    target = torch.zeros(LONG, device="cuda")
    torch.cuda.synchronize()
    with busy_stream():
        target.fill_(7)
        load(declared({"w": target}), tmp_path / "c")
        before = target.clone()
    torch.cuda.synchronize()
    assert is_same(before, values)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tensor_may_change_as_soon_as_save_returns(tmp_path: Path, asynchronous: bool) -> None:
    values = {key: random((LONG,), torch.float32) for key in ("a", "b", "c")}
    tensors = {key: value.cuda() for key, value in values.items()}
    with Checkpointer(tmp_path, async_save=asynchronous) as checkpointer:
        checkpointer.save(1, declared(tensors))
        for tensor in tensors.values():
            tensor.fill_(-1)
    targets = {key: torch.zeros(LONG) for key in values}
    load(declared(targets), tmp_path / "iter_0000001")
    for key, target in targets.items():
        assert is_same(target, values[key])


def test_pinned_memory_is_bounded_and_used_again(tmp_path: Path) -> None:
    tensors = {str(i): torch.ones(LONG, device="cuda") for i in range(8)}

    def round_trip() -> int:
        save(declared(tensors), tmp_path / "c")
        load(declared(tensors), tmp_path / "c")
        return COMMON_BUFFERS.nbytes

    round_trip()
    buffer = COMMON_BUFFERS.take()
    assert buffer.is_pinned()
    COMMON_BUFFERS.give(buffer)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    assert max(round_trip() for _ in range(5)) <= 8 * BUFFER_BYTES
    # Copies of a load may need more buffers than those before, up to the bound.
    assert torch.cuda.host_memory_stats()["num_host_alloc"] - before <= 8


def test_buffers_that_are_not_pinned_do_as_well() -> None:
    buffers = HostBuffers(1 << 20, limit=3)
    buffers._pins = False
    tensor = like(random((1100, 2300), torch.float32).t())
    parts = ((None, part) for part in parts_of(tensor, buffers.buffer_bytes))
    arrived = b"".join(bytes(share) for _, share in to_host(parts, buffers))
    assert not buffers.take().is_pinned()
    assert arrived == b"".join(bytes(share) for share in host_parts(tensor.cpu(), part_bytes=1 << 20))
