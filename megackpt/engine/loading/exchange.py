"""Carrying out an exchange plan: ranks read for each other, one round while the previous one is sent.

Before every round the ranks gather whether one of them has failed, so that no rank waits for bytes that do
not come. `planning.exchange` decides which rank reads and which rank needs what; `transport` moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.comm import Group
from megackpt.comm.device_group import DeviceGroup
from megackpt.engine.data.read import Target, with_target_strides
from megackpt.engine.data.tensor_bytes import as_elements, byte_view, contiguous_bytes, copy_block
from megackpt.engine.loading.prepare import PreparedLoad, ReadResult
from megackpt.engine.loading.transport import Arrival, Buffers, Step, steps_of, transport_for
from megackpt.errors import MismatchError
from megackpt.formats.contents import Chunks, Contents
from megackpt.geometry import row_major_strides
from megackpt.mapping import ShardedTensor
from megackpt.metadata import DeclaredChunks, decode_declarations, pack_columns, unpack_columns
from megackpt.options import LoadOptions
from megackpt.planning import CompactCopies, Copies, StridedCopy, needed_ranges
from megackpt.planning.assignment import Readers
from megackpt.planning.exchange import plan_exchange
from megackpt.planning.exchange_plan import ExchangePlan
from megackpt.validation import PhaseTimes


@dataclass(frozen=True, slots=True)
class ExchangeRanks:
    """The ranks that read for each other.

    Attributes:
        group: the ranks.
        devices: the same ranks, if data is sent from device to device for tensors on devices.
        file_readers: ranks that can read a file of chunks, ascending, by its name; None if all ranks can read
            all files.
    """

    group: Group
    devices: DeviceGroup | None = None
    file_readers: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class RankRequest:
    """What one rank needs from a checkpoint.

    Attributes:
        requested: its declarations; entities are those of tensors, then of objects.
        tensors: filled in place.
        blobs: a buffer of the right length for each object, filled in place; 1-D uint8.
    """

    requested: DeclaredChunks
    tensors: Sequence[ShardedTensor]
    blobs: Sequence[torch.Tensor]

    @property
    def device(self) -> torch.device:
        """A device that has tensors of the request; the host only if all of them are in its memory."""
        found = (t.data.device for t in self.tensors if t.data is not None and t.data.device.type != "cpu")
        return next(found, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class ExchangeReader:
    """Reads a share of what the ranks of a group need, sends it on, and receives the rest.

    Attributes:
        ranks: the group.
        options: options of the load.
        object_buffers: a buffer of the right length for each object of the load; 1-D uint8.
    """

    ranks: ExchangeRanks
    options: LoadOptions
    object_buffers: Sequence[torch.Tensor]

    def read(self, prepared: PreparedLoad) -> ReadResult | None:
        """Fill the tensors of a load and return the bytes of its objects; see `load_by_exchange`."""
        request = RankRequest(prepared.plan.requested, prepared.tensors, self.object_buffers)
        times = load_by_exchange(prepared.contents, request, self.ranks, self.options, where=prepared.where)
        if times is None:
            return None
        return ReadResult([buffer.numpy().tobytes() for buffer in self.object_buffers], times)


def load_by_exchange(
    contents: Contents, wanted: RankRequest, ranks: ExchangeRanks, options: LoadOptions, *, where: str
) -> PhaseTimes | None:
    """Fill what each rank needs, reading every stored byte once. Collective over the group.

    Returns:
        The times of this rank; None if another rank failed, which raises its error itself.

    Raises:
        IntegrityError, StorageError, FormatError: this rank could not read.
        MismatchError: ranks see different checkpoints, or have different options.
        RankFailedError: another rank did not answer.
    """
    group = ranks.group
    messages = group.all_gather(pack_columns(wanted.requested.to_columns()))
    prepared: list[Exchanger] = []
    error: Exception | None = None
    said = b""
    everyone_has_devices = ranks.devices is not None and all(group.all_gather(_has_device(wanted)))
    try:
        plan, chunks = _plan(contents, messages, ranks, options, where)
        devices = ranks.devices.on(wanted.device) if ranks.devices and everyone_has_devices else None
        prepared.append(Exchanger(chunks, plan, ranks=ranks, wanted=wanted, options=options, devices=devices))
        said = plan.fingerprint()
    except Exception as failure:  # noqa: BLE001 - raised when the other ranks know of it
        error = failure
    said_by_all = group.all_gather(said)
    if error is not None:
        raise error
    if not all(said_by_all):
        return None
    if len(set(said_by_all)) > 1:
        raise MismatchError(
            f"{where}: ranks plan different exchanges. They must open the same checkpoint and give equal "
            f"exchange options.",
            path=where,
        )
    return prepared[0].run()


def _has_device(wanted: RankRequest) -> bytes:
    return b"" if wanted.device.type == "cpu" else b"device"


def _plan(
    contents: Contents, messages: Sequence[bytes], ranks: ExchangeRanks, options: LoadOptions, where: str
) -> tuple[ExchangePlan, Chunks]:
    """Decode the requests of the ranks, and plan the exchange for all of them."""
    columns = [unpack_columns(m, where=f"request of rank {rank}") for rank, m in enumerate(messages)]
    requested = decode_declarations(columns)
    different = dict(zip(messages, requested, strict=True))  # replicas have equal requests
    chunks = contents.chunks_for([declared.table for declared in different.values()])
    plan = plan_exchange(
        requested,
        chunks.table,
        position=chunks.position,
        block_bytes=chunks.block_bytes,
        mode=options.exchange,
        buffer_bytes=options.exchange_bytes,
        where=where,
        readers=None if ranks.file_readers is None else _readers(chunks, ranks.file_readers),
    )
    return plan, chunks


def _readers(chunks: Chunks, file_readers: Mapping[str, Sequence[int]]) -> Readers:
    """Return for each chunk the ranks that can read its file."""
    ranges = chunks.file_ranges()
    assert ranges is not None  # whoever gives file_readers has chosen the format
    sets = [list(file_readers[name]) for name in ranges.files]
    return Readers(
        of=ranges.file,
        first=np.cumsum([0, *map(len, sets)], dtype=np.int64),
        ranks=np.array([rank for ranks in sets for rank in ranks], np.int64),
    )


class Exchanger:
    """One rank's side of an exchange."""

    def __init__(
        self,
        chunks: Chunks,
        plan: ExchangePlan,
        *,
        ranks: ExchangeRanks,
        wanted: RankRequest,
        options: LoadOptions,
        devices: DeviceGroup | None,
    ) -> None:
        self._chunks, self._plan, self._group = chunks, plan, ranks.group
        self._verify, self._threads = options.verify, options.threads
        dtypes = {a.key: a.dtype for a in chunks.table.arrays}
        tensors = [Target.of(tensor, dtypes) for tensor in wanted.tensors]
        self._targets = [*tensors, *(Target(blob, torch.uint8) for blob in wanted.blobs)]
        self._blocks = CompactCopies.of(_with_real_targets(plan, ranks.group.rank, wanted.tensors, tensors))
        self._steps = steps_of(plan, ranks.group.rank)
        self._buffers = Buffers(self._steps)
        self._transport = transport_for(
            plan, ranks.group, self._buffers, directly=self._directly, device=devices
        )

    def run(self) -> PhaseTimes | None:
        """Fill this rank's targets. Collective over the group.

        Returns:
            The times of this rank; None if another rank failed, which raises its error itself.

        Raises:
            IntegrityError, StorageError, FormatError: this rank could not read.
            RankFailedError: another rank did not answer.
        """
        pool = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="megackpt-exchange")
        try:
            return self._run(pool)
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, pool: ThreadPoolExecutor) -> PhaseTimes | None:
        read_s = exchange_s = copy_s = 0.0
        error: Exception | None = None
        reading = self._begin_reading(pool, 0)
        for number, step in enumerate(self._steps):
            spent_s, failure = _outcome(reading)
            read_s += spent_s
            error = error or failure
            began = time.perf_counter()
            if any(self._group.all_gather(b"" if error is None else b"failed")):
                if error is not None:
                    raise error
                return None
            # The next round is read into the other buffer, which the last exchange does not use any more.
            reading = self._begin_reading(pool, number + 1)
            arrived = self._transport.move(step, number % 2)
            exchanged = time.perf_counter()
            exchange_s += exchanged - began
            error = self._scatter_all(arrived)
            copy_s += time.perf_counter() - exchanged
        if error is not None:
            raise error
        return PhaseTimes(read_s, exchange_s, copy_s)

    def _begin_reading(self, pool: ThreadPoolExecutor, number: int) -> list[Future[tuple[float, float]]]:
        if number >= len(self._steps):
            return []
        step = self._steps[number]
        return [pool.submit(self._read, step, number % 2, part) for part in step.parts]

    def _read(self, step: Step, parity: int, part: int) -> tuple[float, float]:
        """Read a part, copy what this rank needs of it, and pack what goes into batches; return when."""
        began = time.perf_counter()
        parts, deliveries = self._plan.parts, self._plan.deliveries
        data = self._buffers.part(parity, int(parts.offset[part]), int(parts.nbytes[part]))
        chunk, start = int(parts.chunk[part]), int(parts.start[part])
        to_whom = step.deliveries_of(part)
        for low, high in self._needed(part, to_whom, data.numel()):
            self._chunks.read_into(chunk, start + low, byte_view(data[low:high]), verify=self._verify)
        for delivery in to_whom:
            rank = int(deliveries.rank[delivery])
            if rank == self._group.rank:
                self._scatter(Arrival(delivery, data, begins=0))
            elif rank in step.batches and deliveries.is_batched[delivery]:
                self._pack(delivery, data, self._buffers.batch(parity, step, rank))
        return began, time.perf_counter()

    def _needed(self, part: int, to_whom: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
        deliveries, block = self._plan.deliveries, self._chunks.block_bytes
        if any(deliveries.is_dense[d] and deliveries.nbytes[d] == nbytes for d in to_whom):
            return [(0, nbytes)]
        copies = [copy for d in to_whom for copy in self._copies_of(d)]
        width = int(self._plan.parts.width[part])
        return needed_ranges(copies, width=width, nbytes=nbytes, block_bytes=block)

    def _copies_of(self, delivery: int) -> list[StridedCopy]:
        first = self._plan.deliveries.first
        return self._blocks.copies(int(first[delivery]), int(first[delivery + 1]))

    def _pack(self, delivery: int, data: torch.Tensor, batch: torch.Tensor) -> None:
        """Copy what one rank needs of a part into the batch for it."""
        deliveries = self._plan.deliveries
        start, nbytes = int(deliveries.start[delivery]), int(deliveries.nbytes[delivery])
        offset = int(deliveries.offset[delivery])
        out = batch[offset : offset + nbytes]
        if deliveries.is_dense[delivery]:
            out.copy_(data[start : start + nbytes])
            return
        width = int(self._plan.parts.width[deliveries.part[delivery]])
        elements, packed, at = as_elements(data, width), as_elements(out, width), 0
        for copy in self._copies_of(delivery):
            copy_block(
                elements, 0, packed, replace(copy, target=at, target_stride=row_major_strides(copy.shape))
            )
            at += copy.numel

    def _scatter_all(self, arrived: Sequence[Arrival]) -> Exception | None:
        try:
            for arrival in arrived:
                self._scatter(arrival)
        except Exception as error:  # noqa: BLE001 - raised when the other ranks know of it
            return error
        return None

    def _scatter(self, arrival: Arrival) -> None:
        """Copy what has arrived into the targets."""
        width = int(self._plan.parts.width[self._plan.deliveries.part[arrival.delivery]])
        at = 0
        for copy in self._copies_of(arrival.delivery):
            target = self._targets[copy.entity]
            if arrival.begins is None:  # packed: the elements of the copies, one after the other
                source = replace(copy, source=at, source_stride=row_major_strides(copy.shape))
                copy_block(arrival.data.view(target.element), 0, target.memory, source)
                at += copy.numel
            else:
                elements = arrival.data.view(target.element)
                copy_block(elements, arrival.begins // width, target.memory, copy)

    def _directly(self, delivery: int) -> memoryview | None:
        """Return the memory that a delivery on its own fills, where one contiguous copy takes all of it."""
        first = self._plan.deliveries.first[delivery : delivery + 2]
        if first[1] - first[0] != 1:
            return None
        (copy,) = self._copies_of(delivery)
        target = self._targets[copy.entity]
        return None if target.is_cast else contiguous_bytes(target.memory, copy)


def _with_real_targets(
    plan: ExchangePlan, rank: int, tensors: Sequence[ShardedTensor], targets: Sequence[Target]
) -> Copies:
    """Return copies in which those of this rank have the strides of its tensors."""
    of_rank = np.repeat(plan.deliveries.rank, np.diff(plan.deliveries.first))
    mine = np.flatnonzero(of_rank == rank)
    placed = with_target_strides(plan.copies.take(mine), tensors, [t.memory for t in targets])
    first, stride = plan.copies.target_first.copy(), plan.copies.target_stride.copy()
    first[mine], stride[mine] = placed.target_first, placed.target_stride
    return replace(plan.copies, target_first=first, target_stride=stride)


def _outcome(reading: Sequence[Future[tuple[float, float]]]) -> tuple[float, Exception | None]:
    """Wait for all; return how long they were under way together, and the first error."""
    wait(reading)
    errors = [error for future in reading if (error := future.exception()) is not None]
    if errors:
        if isinstance(errors[0], Exception):
            return 0.0, errors[0]
        raise errors[0]
    times = [future.result() for future in reading]
    return max((end for _, end in times), default=0.0) - min((begin for begin, _ in times), default=0.0), None
