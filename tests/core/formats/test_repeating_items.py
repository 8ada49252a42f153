"""A tensor in an item of torch_dist may repeat its bytes, up to a limit of memory."""

from __future__ import annotations

import pytest
import torch

from megackpt.errors import FormatError
from megackpt.formats.torch_dist import item_chunks
from megackpt.formats.torch_dist.item_chunks import _row_major
from megackpt.formats.torch_dist.metadata_reader import Item


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
