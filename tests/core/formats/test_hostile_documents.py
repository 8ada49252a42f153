"""Documents of a checkpoint that lie, digests fitting: an error of ours before memory is taken, or a load.

Without fitting digests, `tests/system/faults/test_corruption.py` asks for more: what was saved, or an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import FormatError, LoadOptions, ShardedTensor, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.formats.zarr.chunks import MAX_CHUNKS
from megackpt.testing.world import SimulatedWorld
from tests.support.effort import few
from tests.support.zarr_v1 import save_zarr_v1
from tests.system.attacks.crafting import NATIVE, Location, build_base, edit_index, edit_json, request
from tests.system.attacks.mutation import Files, checkpoint, mutated, outcome

BACKENDS = [("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3)]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda b: f"{b[0]}-{b[1]}")
def files(request: pytest.FixtureRequest) -> Files:
    return checkpoint(request.param)


@pytest.mark.filterwarnings("ignore")
@settings(
    max_examples=few(20, of=50),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_hostile_value_leads_to_an_error_of_ours_or_to_a_load(files: Files, data: st.DataObject) -> None:
    choose: Callable[[int], int] = lambda subdirectory: data.draw(st.integers(0, subdirectory - 1))  # noqa: E731
    outcome(mutated(files, choose), {})


VAST = 2**40


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (MAX_CHUNKS, "chunk '3' of .* is missing"),
        (MAX_CHUNKS + 1, "has 4,194,305 chunks, more than the 4,194,304"),
    ],
)
def test_an_array_of_zarr_with_too_many_chunks_raises_an_error_before_its_files_are_looked_for(
    tmp_path: Path, count: int, message: str
) -> None:
    save_zarr_v1({"a": ShardedTensor.from_rank_offsets("a", torch.ones(3))}, tmp_path)
    before = json.loads((tmp_path / "a" / ".zarray").read_text())
    data = np.ones(1, before["dtype"]).tobytes()
    for number in range(3):
        (tmp_path / "a" / str(number)).write_bytes(data)
    edit_json(tmp_path / "a" / ".zarray", shape=[count], chunks=[1])
    with pytest.raises(FormatError, match=message):
        load({"a": ShardedTensor.from_rank_offsets("a", torch.zeros(1), (0, 0, count))}, tmp_path)


@pytest.mark.parametrize("exchange", ["direct", "all_to_all"])
def test_an_object_that_is_longer_than_its_file_raises_an_error_before_memory_is_taken(
    tmp_path: Path, exchange: str
) -> None:
    build_base(NATIVE, tmp_path / "c")
    location = Location(directory=tmp_path / "c", outside=tmp_path, ran=tmp_path, other=tmp_path)

    def lie(columns: dict[str, Any]) -> None:
        wide = columns["nbytes"].astype(np.int64)
        wide[-1] = VAST
        columns["nbytes"] = wide
        columns["digest"] = np.append(columns["digest"][:-1], np.zeros(VAST // 2**18, np.uint64))

    edit_index(location, lie)

    def load_rank(group: Group) -> None:
        state = request(empty=True, ranks=(group.rank,))
        load(state, location.directory, options=LoadOptions(exchange=exchange), group=group)

    for error in SimulatedWorld(2).outcomes(load_rank):
        assert isinstance(error, FormatError), error
        assert "Rank 1 failed while" in str(error)
        assert "It was cut short" in str(error)


def test_an_array_that_ends_behind_its_file_raises_an_error_before_any_chunk_is_read(tmp_path: Path) -> None:
    save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(100_000))}, tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    with file.open("r+b") as opened:
        opened.truncate(200_000)
    message = r"'a' .* ends at byte 200,000, before this chunk does at 4\d\d,\d\d\d"
    with pytest.raises(FormatError, match=message):
        load_plain_tensors(tmp_path)
