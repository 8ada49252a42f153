"""An item is a zip file that needs no newer reader than its size does, as the format of zip files says."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest

from megackpt.formats.torch_dist import item as items
from megackpt.formats.torch_dist.item import frame_of, stream

LOCAL = struct.Struct("<4sH")


@pytest.mark.parametrize(("zip64_from", "version"), [(1 << 32, 20), (1, 45)])
def test_an_item_needs_zip_2_0_and_only_with_64_bit_sizes_4_5(
    zip64_from: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "ZIP64_FROM", zip64_from)
    data = b"".join(stream(frame_of("uint8", (5,)), [memoryview(b"01234")]))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry.filename.rpartition("/")[2]: entry for entry in archive.infolist()}
    needed = {name: LOCAL.unpack_from(data, entry.header_offset)[1] for name, entry in entries.items()}
    assert needed.pop("0") == version  # the bytes of the tensor
    assert set(needed.values()) == {20}
