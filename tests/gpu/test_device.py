"""State on a CUDA device: tensors, context parallelism, random states."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt import (
    AsyncOptions,
    Checkpointer,
    KeyRule,
    LoadOptions,
    Policy,
    SaveOptions,
    ShardedTensor,
    load,
    save,
)
from megackpt.engine.background.staging_memory import StagingMemory
from megackpt.engine.data.device_copies import (
    COMMON_BUFFERS,
    Downloads,
    HostBuffers,
    bytes_on_device,
    follow,
    host_parts,
    to_host,
    unpin,
)
from megackpt.engine.data.tensor_bytes import as_bits, byte_view, parts_of
from megackpt.plans.metadata import DTYPES
from megackpt.storage.rawio import BUFFER_BYTES
from megackpt.training.parallel import (
    ParallelGroups,
    ParallelLayout,
    ParallelRng,
    causal_attention,
    context_positions,
)
from megackpt.training.parallel.context import AttentionPart, _attend
from megackpt.training.parallel.rng import dropout
from megackpt.training.state import RankPosition, RngState, Seeds, TrackedRng
from tests.support.writers import saver_of

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


IN_WAVES = 1 << 20  # bytes of staging memory: a quarter of a part


@pytest.mark.parametrize(
    ("backend", "options", "part_bytes"),
    [
        ("megackpt", AsyncOptions(), SaveOptions().part_bytes),
        ("megackpt", AsyncOptions(staging_bytes=IN_WAVES), SaveOptions().part_bytes),
        ("megackpt", AsyncOptions(staging_bytes=IN_WAVES), 30_001),
        ("megackpt", AsyncOptions(stage_in_background=True), SaveOptions().part_bytes),
        ("torch_dist", AsyncOptions(), SaveOptions().part_bytes),
    ],
    ids=["once", "in waves", "in waves, small parts", "in background", "torch_dist"],
)
def test_what_is_saved_asynchronously_from_a_device_is_loaded_on_the_host(
    tmp_path: Path, backend: str, options: AsyncOptions, part_bytes: int
) -> None:
    host = on_host()
    state = declared({key: like(t) for key, t in host.items()} | {"on the host": host["cut"]})
    with Checkpointer(
        tmp_path, async_save=options, save_options=SaveOptions(part_bytes=part_bytes)
    ) as checkpointer:
        for step in (1, 2):  # into new memory, and into memory that has bytes
            checkpointer.save(step, state, sharded_strategy=(backend, 1))
        checkpointer.wait()
        assert is_pinned(saver_of(checkpointer)._session.writer.memory)
    for step in (1, 2):
        targets = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in host.items()}
        targets["on the host"] = torch.zeros_like(host["cut"])
        load(declared(targets), tmp_path / f"iter_{step:07}")
        assert is_same(targets.pop("on the host"), host["cut"])
        for key, target in targets.items():
            assert is_same(target, host[key]), key


def is_pinned(memory: StagingMemory) -> bool:
    return torch.from_numpy(memory.array).is_pinned()


def test_staging_memory_is_pinned_once_and_again_when_it_has_grown(tmp_path: Path) -> None:
    def state(count: int) -> dict[str, Any]:
        return declared({str(i): torch.ones(LONG, device="cuda") for i in range(count)})

    with (
        Checkpointer(tmp_path / "a", async_save=True) as growing,
        Checkpointer(tmp_path / "b", async_save=True) as steady,
    ):
        memories = [saver_of(checkpointer)._session.writer.memory for checkpointer in (growing, steady)]
        for checkpointer, memory in zip((growing, steady), memories, strict=True):
            checkpointer.warm_up(state(1))
            assert is_pinned(memory)
        before = memories[0].array
        growing.save(1, state(1))
        assert memories[0].array is before
        growing.save(2, state(3))
        steady.save(1, state(1))
        assert all(map(is_pinned, memories))
        assert memories[0].nbytes > before.nbytes
        # A view keeps the old memory mapped, but it is not pinned any more.
        assert not torch.from_numpy(before).is_pinned()
        last = memories[0].array
    assert not torch.from_numpy(last).is_pinned()
    assert [memory.nbytes for memory in memories] == [0, 0]


def test_memory_that_cannot_be_pinned_takes_the_same_bytes_and_later_kernels_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = random((1500, 2300), torch.float32).t()
    tensor = like(values)
    memory = StagingMemory()
    memory.resize(4 * values.numel())
    first_page = memory.array[:4096]
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(first_page.ctypes.data, 4096, 1))
    with caplog.at_level(logging.WARNING):
        memory.pin(torch.device("cuda"))  # CUDA registers no page twice
        memory.pin(torch.device("cuda"))
    unpin(first_page)
    assert len(caplog.records) == 1
    assert "cannot be pinned (part or all of the requested memory range is already mapped)" in caplog.text
    assert torch.ones(3, device="cuda").sum().item() == 3
    assert not is_pinned(memory)
    follow([tensor])
    position = 0
    with Downloads() as downloads:
        for part in bytes_on_device(tensor, 1 << 20):
            downloads.copy(part, memory.array[position : position + len(part)])
            position += len(part)
    assert memory.array[:position].tobytes() == np.ascontiguousarray(values.numpy()).tobytes()
    memory.close()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_tensor_still_being_computed_is_staged_complete(tmp_path: Path, in_background: bool) -> None:
    values = random((LONG,), torch.float32).cuda()
    tensor, strided = torch.zeros_like(values), torch.zeros(2 * LONG, device="cuda")[::2]
    state = declared({"w": tensor, "strided": strided})
    torch.cuda.synchronize()
    options = AsyncOptions(stage_in_background=in_background)
    with Checkpointer(tmp_path, async_save=options) as checkpointer:
        checkpointer.warm_up(state)
        with busy_stream():
            tensor.copy_(values)
            strided.copy_(values)
            checkpointer.save(1, state)
            checkpointer.wait_staged()
    for key in ("w", "strided"):
        target = torch.zeros(LONG)
        load(declared({key: target}), tmp_path / "iter_0000001")
        assert is_same(target, values)


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


ONE = ParallelGroups.create(ParallelLayout())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_late_queries_attend_to_what_they_do_in_the_whole_sequence(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, 64, 32, generator=generator, device="cuda", dtype=dtype) for heads in (8, 2, 2)
    )
    whole = causal_attention(q, k, v, ONE.cp)
    out = _attend(AttentionPart(q[:, :, 16:32], k[:, :, :32], v[:, :, :32]), scale=None)
    # Other kernels sum in another order: rounding errors of fp32, and of bf16 two of its steps at 1.
    torch.testing.assert_close(out, whole[:, :, 16:32], rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_positions_and_streams_are_on_the_device() -> None:
    cp = ParallelGroups.offline(ParallelLayout(cp=2), 1).cp
    positions = context_positions(8, cp, device="cuda")
    assert (positions.device.type, positions.tolist()) == ("cuda", [2, 3, 4, 5])
    rng = ParallelRng(1, ONE, device="cuda")
    state = rng.state_dict()
    expected = [dropout(torch.ones(9, device="cuda"), 0.5, rng.generator(s)) for s in ("distinct", "expert")]
    rng.reseed(3)
    rng.load_state_dict(state)
    actual = [dropout(torch.ones(9, device="cuda"), 0.5, rng.generator(s)) for s in ("distinct", "expert")]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def tracker_of(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("megatron.core.tensor_parallel.random")
    tracker = module.CudaRNGStatesTracker()
    tracker.add(name, 17)
    return tracker


def draws(tracker: Any) -> list[Any]:
    devices = [torch.rand(3, device=f"cuda:{n}").tolist() for n in range(torch.cuda.device_count())]
    with tracker.fork("model-parallel-rng"):
        return [*devices, torch.rand(3, device="cuda").tolist()]


def test_streams_of_all_devices_and_of_the_tracker_go_on(tmp_path: Path) -> None:
    tracker = tracker_of("model-parallel-rng")
    rng = RngState.of_process(RankPosition.single_process(), seed=1, tracker=tracker)
    draws(tracker)
    save(rng.sharded_state_dict(), tmp_path / "c")
    expected = draws(tracker)
    draws(tracker)
    rng.resume(load(rng.sharded_state_dict(), tmp_path / "c"), step=1)
    assert draws(tracker) == expected


def test_fresh_states_of_the_tracker_are_those_of_cuda_generators() -> None:
    tracker = tracker_of("model-parallel-rng")
    before = tracker.get_states()["model-parallel-rng"]
    TrackedRng(tracker).reseed(Seeds(base=1, step=3, position=RankPosition.single_process()))
    fresh = tracker.get_states()["model-parallel-rng"]
    assert fresh.shape == before.shape
    assert not torch.equal(fresh, before)
    assert len(draws(tracker)[-1]) == 3
