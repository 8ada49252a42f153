"""States that the tests of a format save, what they do to files, and a strategy that watches its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.entities import ShardedObject, ShardedStateDict, ShardedTensor
from megackpt.formats.strategy import ChunkParts, SaveStrategy
from megackpt.plans.geometry import Ints
from megackpt.run.collective import load
from megackpt.storage import Store


def whole(key: str, data: torch.Tensor) -> ShardedTensor:
    """Declare a tensor as a whole array."""
    return ShardedTensor.from_rank_offsets(key, data)


def numbered_state(number: int) -> ShardedStateDict:
    """Return an array, an object and a common value that all have one number."""
    return {
        "w": whole("w", torch.full((40, 50), float(number))),
        "o": ShardedObject("o", number, (1,), (0,)),
        "number": number,
    }


def loaded_number(store: Store) -> int:
    """Load what `numbered_state` saved, and return its number. Everything must be of one save."""
    loaded = load({"w": whole("w", torch.zeros(40, 50)), "o": ShardedObject("o", None, (1,), (0,))}, store)
    number = loaded["number"]
    assert isinstance(number, int)
    assert loaded["o"] == number
    assert torch.equal(loaded["w"], torch.full((40, 50), float(number)))
    return number


def cut_file(store: Store, name: str) -> None:
    """Cut a file to half of its length."""
    data = store.read(name, max_bytes=1 << 30)
    store.write(name, data[: len(data) // 2])


def remove_file(store: Store, name: str) -> None:
    """Delete a file."""
    store.delete([name])
    store.sync()


def data_of(tensor: ShardedTensor) -> torch.Tensor:
    """Return the tensor of an entity that has one."""
    assert tensor.data is not None
    return tensor.data


def declared_chunks(owned: Sequence[Any], array: torch.Tensor, rank: int) -> list[ShardedTensor]:
    """Declare the chunks of an array that a rank owns."""
    return [chunk.declare("array", array) for chunk in owned if chunk.rank == rank]


def bytes_of(tensor: ShardedTensor) -> bytes:
    """Return the bytes of the tensor of an entity."""
    return bytes(byte_view(as_bits(data_of(tensor)).contiguous()))


@SaveStrategy.register
class StrategyOfPartsGivenOnce:
    """A strategy that is given parts whose memory is overwritten as soon as that is allowed."""

    def __init__(self, strategy: SaveStrategy) -> None:
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    def write_chunks(self, store: Store, *, rows: Ints, parts: ChunkParts, **arguments: Any) -> bytes:
        """Write chunks from such parts."""
        return self._strategy.write_chunks(store, rows=rows, parts=_PartsGivenOnce(parts), **arguments)


class _PartsGivenOnce(ChunkParts):
    def __init__(self, parts: ChunkParts) -> None:
        self._parts = parts

    def __call__(self, row: int) -> Iterator[memoryview]:
        for part in self._parts(row):
            copy = bytearray(part)
            try:
                yield memoryview(copy)
            finally:
                copy[:] = bytes(len(copy))
