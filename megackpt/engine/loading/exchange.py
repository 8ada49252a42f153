"""Executes an exchange plan: reads the parts of one round while those of the previous round are sent.

Before every round, each rank sends the others whether it has failed, so that no rank waits for bytes that
are never sent. `plans.planning` decides which rank reads what, and which ranks need it; `rounds` lays out
buffers and moves the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from megackpt.comm import AnyGroup, Group, errors_on_all_ranks
from megackpt.comm.process_groups import DeviceGroup, check_group_argument, subgroup
from megackpt.engine.data.read import Target, probe_chunk, with_target_strides
from megackpt.engine.data.tensor_bytes import as_elements, byte_view, contiguous_bytes, copy_block
from megackpt.engine.loading.prepared_load import PreparedLoad, ReadResult
from megackpt.engine.loading.rounds import Arrival, RankRound, RoundBuffers, round_exchange_for, rounds_of
from megackpt.engine.loading.source import LoadRequest
from megackpt.entities import ShardedTensor
from megackpt.errors import DeclarationError, MismatchError
from megackpt.formats.contents import Chunks, Contents
from megackpt.options import LoadOptions
from megackpt.plans.geometry import row_major_strides
from megackpt.plans.metadata import DeclaredChunks, pack_columns, unpack_columns
from megackpt.plans.metadata.merge import decode_declarations
from megackpt.plans.planning import CompactCopies, Copies, StridedCopy
from megackpt.plans.planning.exchange import plan_exchange
from megackpt.plans.planning.exchange_plan import ExchangePlan, Readers, needed_ranges
from megackpt.plans.validation import PhaseTimes


@dataclass(frozen=True, slots=True)
class ExchangeRanks:
    """The ranks that exchange the bytes that they read.

    Attributes:
        group: the ranks.
        devices: the same ranks, if data goes from device to device where tensors lie on devices.
        file_readers: ranks that can read a file of chunks, ascending, by its name; None if all ranks can read
            all files.
    """

    group: Group
    devices: DeviceGroup | None = None
    file_readers: Mapping[str, Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class RankRequest:
    """The request of one rank in a load.

    Attributes:
        requested: declarations of the rank; entities are those of tensors, then of objects.
        tensors: filled in place.
        blobs: a buffer of the right length for each object, filled in place; 1-D uint8.
    """

    requested: DeclaredChunks
    tensors: Sequence[ShardedTensor]
    blobs: Sequence[torch.Tensor]

    @property
    def device(self) -> torch.device:
        """The first device of a tensor that is not the CPU; the CPU if all tensors lie there."""
        devices = (t.data.device for t in self.tensors if t.data is not None and t.data.device.type != "cpu")
        return next(devices, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class ExchangeReader:
    """Reads a share of the bytes that the ranks of a group need, sends it to them, and receives the rest.

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
        request = RankRequest(prepared.plan.requested, prepared.plan.tensors, self.object_buffers)
        times = load_by_exchange(prepared.contents, request, self.ranks, self.options, where=prepared.where)
        if times is None:
            return None
        return ReadResult([buffer.numpy().tobytes() for buffer in self.object_buffers], times)


def load_by_exchange(
    contents: Contents, request: RankRequest, ranks: ExchangeRanks, options: LoadOptions, *, where: str
) -> PhaseTimes | None:
    """Fill the request of each rank; each stored byte is read once. Collective over the group.

    Returns:
        The times of this rank; None if another rank of the group failed, which raises its error.

    Raises:
        IntegrityError, StorageError, FormatError: this rank could not read.
        MismatchError: ranks do not see the same checkpoint, or have other options.
        RankFailedError: another rank did not answer.
    """
    group = ranks.group
    # Every rank plans for all, from the same requests: nobody waits for a plan.
    messages = group.all_gather(pack_columns(request.requested.to_columns()))
    # `cpu_transfer` is equal on all ranks, so all of them make this exchange or none does.
    all_have_devices = ranks.devices is not None and all(group.all_gather(_has_device(request)))
    devices = ranks.devices.on(request.device) if ranks.devices and all_have_devices else None
    exchange: RankExchange | None = None
    error: Exception | None = None
    fingerprint = b""
    try:
        plan, chunks = _plan(contents, messages, ranks, options, where)
        exchange = RankExchange(chunks, plan, ranks=ranks, request=request, options=options, devices=devices)
        fingerprint = plan.fingerprint()
    except Exception as failure:  # noqa: BLE001 - raised when the other ranks know of it
        error = failure
    # An empty fingerprint says that the rank has failed.
    fingerprints = group.all_gather(fingerprint)
    if error is not None:
        raise error
    if exchange is None or not all(fingerprints):
        return None
    if len(set(fingerprints)) > 1:
        raise MismatchError(
            f"{where}: ranks plan different exchanges. They must open the same checkpoint and give equal "
            f"exchange options.",
            path=where,
        )
    return exchange.run()


def _has_device(request: RankRequest) -> bytes:
    return b"" if request.device.type == "cpu" else b"device"


def _plan(
    contents: Contents, messages: Sequence[bytes], ranks: ExchangeRanks, options: LoadOptions, where: str
) -> tuple[ExchangePlan, Chunks]:
    """Decode the requests of all ranks of the group, and plan for all of them."""
    columns = [unpack_columns(m, where=f"request of rank {rank}") for rank, m in enumerate(messages)]
    requested = decode_declarations(columns)
    # Requests of replicas are equal; each different one is planned once.
    different = dict(zip(messages, requested, strict=True))
    chunks = contents.chunks_for([declared.table for declared in different.values()])
    plan = plan_exchange(
        requested,
        chunks.table,
        position=chunks.position,
        block_bytes=chunks.block_bytes,
        has_one_reader=options.exchange == "two_stage",
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
    # Set s of readers is ranks[first[s] : first[s + 1]], and each chunk has the set of its file.
    return Readers(
        of=ranges.file,
        first=np.cumsum([0, *map(len, sets)], dtype=np.int64),
        ranks=np.array([rank for ranks in sets for rank in ranks], np.int64),
    )


class RankExchange:
    """One rank's side of an exchange: reads its parts, sends them, and copies the bytes that arrive."""

    def __init__(
        self,
        chunks: Chunks,
        plan: ExchangePlan,
        *,
        ranks: ExchangeRanks,
        request: RankRequest,
        options: LoadOptions,
        devices: DeviceGroup | None,
    ) -> None:
        self._chunks, self._plan, self._group = chunks, plan, ranks.group
        self._verify, self._threads = options.verify, options.threads
        dtypes = {a.key: a.dtype for a in chunks.table.arrays}
        tensors = [Target.of(tensor, dtypes) for tensor in request.tensors]
        self._targets = [*tensors, *(Target(blob, torch.uint8) for blob in request.blobs)]
        self._blocks = CompactCopies.of(_with_real_targets(plan, ranks.group.rank, request.tensors, tensors))
        self._rounds = rounds_of(plan, ranks.group.rank)
        self._buffers = RoundBuffers(self._rounds)
        self._round_exchange = round_exchange_for(
            plan, ranks.group, self._buffers, target_memory=self._target_memory, device=devices
        )

    def run(self) -> PhaseTimes | None:
        """Fill this rank's targets. Collective over the group.

        Returns:
            The times of this rank; None if another rank of the group failed, which raises its error.

        Raises:
            IntegrityError, StorageError, FormatError: this rank could not read.
            RankFailedError: another rank did not answer.
        """
        pool = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="megackpt-exchange")
        try:
            return self._run(pool)
        finally:
            # Waits for reads that have begun: the caller may free or change the tensors next.
            pool.shutdown(cancel_futures=True)

    def _run(self, pool: ThreadPoolExecutor) -> PhaseTimes | None:
        read_s = exchange_s = copy_s = 0.0
        error: Exception | None = None
        reading = self._begin_reading(pool, 0)
        for number, rank_round in enumerate(self._rounds):
            spent_s, failure = _outcome(reading)
            read_s += spent_s
            error = error or failure
            began = time.perf_counter()
            # No rank begins to send before all ranks have read their parts of the round.
            if any(self._group.all_gather(b"" if error is None else b"failed")):
                if error is not None:
                    raise error
                return None
            # The next round is read into the other buffer: its bytes were sent in the round before this one.
            reading = self._begin_reading(pool, number + 1)
            arrivals = self._round_exchange.move(rank_round, number % 2)
            exchanged = time.perf_counter()
            exchange_s += exchanged - began
            # Not raised here: the other ranks learn of it before the next round, and after the last one from
            # the step that the caller makes.
            error = self._copy_arrivals(arrivals)
            copy_s += time.perf_counter() - exchanged
        if error is not None:
            raise error
        return PhaseTimes(read_s, exchange_s, copy_s)

    def _begin_reading(self, pool: ThreadPoolExecutor, number: int) -> list[Future[tuple[float, float]]]:
        if number >= len(self._rounds):
            return []
        rank_round = self._rounds[number]
        return [pool.submit(self._read, rank_round, number % 2, part) for part in rank_round.parts]

    def _read(self, rank_round: RankRound, parity: int, part: int) -> tuple[float, float]:
        """Read a part, copy the bytes that this rank needs, and pack batches; return start and end time."""
        began = time.perf_counter()
        parts, deliveries = self._plan.parts, self._plan.deliveries
        data = self._buffers.part(parity, int(parts.offset[part]), int(parts.nbytes[part]))
        chunk, start = int(parts.chunk[part]), int(parts.start[part])
        of_part = rank_round.deliveries_of(part)
        for low, high in self._needed_ranges(part, of_part, data.numel()):
            self._chunks.read_into(chunk, start + low, byte_view(data[low:high]), verify=self._verify)
        for delivery in of_part:
            rank = int(deliveries.rank[delivery])
            if rank == self._group.rank:
                # In this thread, while others copy their parts: no two parts have the same element of a
                # target.
                self._copy_to_targets(Arrival(delivery, data, begins=0))
            elif rank in rank_round.batches and deliveries.is_batched[delivery]:
                self._pack(delivery, data, self._buffers.batch(parity, rank_round, rank))
        return began, time.perf_counter()

    def _needed_ranges(self, part: int, of_part: Sequence[int], nbytes: int) -> list[tuple[int, int]]:
        """Return the ranges of a part that its deliveries need, in bytes."""
        deliveries, block = self._plan.deliveries, self._chunks.block_bytes
        # One rank needs the whole part, so there is nothing to leave out.
        if any(deliveries.is_dense[d] and deliveries.nbytes[d] == nbytes for d in of_part):
            return [(0, nbytes)]
        copies = [copy for d in of_part for copy in self._copies_of(d)]
        width = int(self._plan.parts.width[part])
        return needed_ranges(copies, width=width, nbytes=nbytes, block_bytes=block)

    def _copies_of(self, delivery: int) -> list[StridedCopy]:
        first = self._plan.deliveries.first
        return self._blocks.copies(int(first[delivery]), int(first[delivery + 1]))

    def _pack(self, delivery: int, data: torch.Tensor, batch: torch.Tensor) -> None:
        """Copy the bytes of a delivery from a part into the batch for its rank."""
        deliveries = self._plan.deliveries
        start, nbytes = int(deliveries.start[delivery]), int(deliveries.nbytes[delivery])
        offset = int(deliveries.offset[delivery])
        out = batch[offset : offset + nbytes]
        if deliveries.is_dense[delivery]:
            out.copy_(data[start : start + nbytes])
            return
        width = int(self._plan.parts.width[deliveries.part[delivery]])
        # One copy after the other, each in row-major order. The receiver has the same plan and finds them so.
        elements, packed, at = as_elements(data, width), as_elements(out, width), 0
        for copy in self._copies_of(delivery):
            copy_block(
                elements, 0, packed, replace(copy, target=at, target_stride=row_major_strides(copy.shape))
            )
            at += copy.numel

    def _copy_arrivals(self, arrivals: Sequence[Arrival]) -> Exception | None:
        """Copy the bytes that have arrived into the targets; return the error if there was one."""
        try:
            for arrival in arrivals:
                self._copy_to_targets(arrival)
        except Exception as error:  # noqa: BLE001 - raised when the other ranks know of it
            return error
        return None

    def _copy_to_targets(self, arrival: Arrival) -> None:
        """Copy the bytes of a delivery into the targets of its copies."""
        width = int(self._plan.parts.width[self._plan.deliveries.part[arrival.delivery]])
        at = 0
        for copy in self._copies_of(arrival.delivery):
            target = self._targets[copy.entity]
            if arrival.begins is None:  # packed: the elements of one copy after the other
                source = replace(copy, source=at, source_stride=row_major_strides(copy.shape))
                copy_block(arrival.data.view(target.element), 0, target.memory, source)
                at += copy.numel
            else:
                elements = arrival.data.view(target.element)
                copy_block(elements, arrival.begins // width, target.memory, copy)

    def _target_memory(self, delivery: int) -> memoryview | None:
        """Return the memory that a delivery fills, if it has one copy, contiguous and without a cast."""
        first = self._plan.deliveries.first[delivery : delivery + 2]
        if first[1] - first[0] != 1:
            return None
        (copy,) = self._copies_of(delivery)
        target = self._targets[copy.entity]
        return None if target.is_cast else contiguous_bytes(target.memory, copy)


def _with_real_targets(
    plan: ExchangePlan, rank: int, tensors: Sequence[ShardedTensor], targets: Sequence[Target]
) -> Copies:
    """Return the copies of a plan, those of this rank with the strides of its tensors."""
    # Copies are sorted as deliveries. Those of other ranks are only packed here, without target strides.
    rank_of_copy = np.repeat(plan.deliveries.rank, np.diff(plan.deliveries.first))
    own = np.flatnonzero(rank_of_copy == rank)
    with_strides = with_target_strides(plan.copies.take(own), tensors, [t.memory for t in targets])
    first, stride = plan.copies.target_first.copy(), plan.copies.target_stride.copy()
    first[own], stride[own] = with_strides.target_first, with_strides.target_stride
    return replace(plan.copies, target_first=first, target_stride=stride)


def _outcome(reading: Sequence[Future[tuple[float, float]]]) -> tuple[float, Exception | None]:
    """Wait for all reads; return the seconds from the first begin to the last end, and the first error."""
    errors = [error for future in reading if (error := future.exception()) is not None]
    if errors:
        if isinstance(errors[0], Exception):
            return 0.0, errors[0]
        raise errors[0]
    times = [future.result() for future in reading]
    return max((end for _, end in times), default=0.0) - min((begin for begin, _ in times), default=0.0), None


# Before ranks read for each other: checks the group that they give, and connects its ranks.


def check_exchange_group(options: LoadOptions, exchange_group: AnyGroup | None, *, has_map: bool) -> None:
    """Check that the exchange group fits the options. Local.

    Raises:
        DeclarationError: it does not.
    """
    is_direct = options.exchange == "direct" or (options.exchange == "auto" and not has_map)
    if is_direct and exchange_group is not None:
        raise DeclarationError(
            f"exchange_group is given, but with LoadOptions.exchange={options.exchange!r} every rank reads "
            f"for itself. Choose a mode of exchange, such as 'all_to_all', or leave the group out."
        )
    if exchange_group is not None:
        check_group_argument("exchange_group", exchange_group)
    if not options.cpu_transfer:
        DeviceGroup(exchange_group)  # raises an error if the group has no backend for devices


def connect_exchange(request: LoadRequest, prepared: PreparedLoad, group: Group) -> ExchangeReader | None:
    """Connect the ranks of the exchange group; None if this rank is alone in it. Collective over the group.

    Raises:
        CheckpointError: the ranks could not be connected; the same on every rank.
    """
    with errors_on_all_ranks(group, "connecting the ranks that exchange"):
        reader = _connect(request, prepared, group)
    return reader


def _connect(request: LoadRequest, prepared: PreparedLoad, group: Group) -> ExchangeReader | None:
    """Connect the ranks of the exchange group; allocate buffers for objects before other ranks wait."""
    options, plan = request.options, prepared.plan
    devices = None if options.cpu_transfer else DeviceGroup(request.exchange_group)
    group_of_ranks = group if request.exchange_group is None else request.exchange_group
    ranks = ExchangeRanks(
        subgroup(group_of_ranks, timeout_s=options.timeout_s), devices, request.file_readers
    )
    if ranks.group.size == 1:
        return None
    if request.file_readers is None:  # else only other ranks may have the files, and have checked them
        for row in plan.object_rows:
            probe_chunk(plan.chunks, row)
    lengths = plan.chunks.table.nbytes[plan.object_rows].tolist()
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in lengths]
    return ExchangeReader(ranks, options, buffers)
