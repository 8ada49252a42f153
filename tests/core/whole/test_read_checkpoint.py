"""docs/read_checkpoint.py, which knows only docs/format.md, agrees with load."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import SaveOptions, ShardedObject, load, load_plain_tensors, save
from megackpt.engine.data.tensor_bytes import as_bits, byte_view
from megackpt.testing.format_trials import declared_chunks
from megackpt.testing.layouts import arrays, owned_chunks
from tests.support.effort import few
from tests.support.states import filled, save_on_ranks, sharded

HAS_DIGESTS = importlib.util.find_spec("awscrt") is not None
ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "docs" / "read_checkpoint.py"


@cache
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_checkpoint", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reader_fits_in_150_lines_and_imports_only_numpy() -> None:
    lines = PROGRAM.read_text().splitlines()
    assert len(lines) <= 150
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"numpy"}


def slices(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Slices, also empty ones and such with negative ends, integers, and an ellipsis anywhere."""

    def of(n: int) -> st.SearchStrategy[Any]:
        ends = st.none() | st.integers(-n - 1, n + 1)
        some = st.builds(slice, ends, ends)
        return some | st.integers(-n, n - 1) if n else some

    whole = st.tuples(*map(of, shape))
    return st.builds(
        lambda parts, at, n: (*parts[:at], ..., *parts[at + n :]) if n else parts,
        whole,
        st.integers(0, len(shape)),
        st.integers(0, 2),
    )


@settings(max_examples=few(30, of=300), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(max_dims=3), ranks=st.integers(1, 3))
def test_the_reader_agrees_with_load_at_any_layout(
    data: st.DataObject, array: torch.Tensor, ranks: int, tmp_path_factory: object
) -> None:
    layout = data.draw(owned_chunks(tuple(array.shape), ranks=ranks))
    options = SaveOptions(array_digests=HAS_DIGESTS and data.draw(st.booleans()))  # it knows nothing of them
    directory = tmp_path_factory.mktemp("reader")  # type: ignore[attr-defined]
    save_on_ranks(
        ranks,
        lambda rank: {"shards": declared_chunks(layout, array, rank)},
        directory,
        options=options,
    )
    checkpoint = reader().Checkpoint(directory)
    theirs = checkpoint.array("array", raw=True)
    ours = load_plain_tensors(directory)["array"]
    assert theirs.shape == tuple(ours.shape)
    assert np.ascontiguousarray(theirs).tobytes() == bytes(byte_view(as_bits(ours)))
    index = data.draw(slices(theirs.shape))
    part = checkpoint.array("array", index, raw=True)
    assert part.shape == theirs[index].shape
    assert part.tobytes() == theirs[index].tobytes()


def test_the_reader_passes_over_parity(tmp_path: Path) -> None:
    save_on_ranks(
        3,
        lambda rank: {"rows": sharded("rows", torch.arange(6.0) + rank, (0, rank, 3))},
        tmp_path,
        options=SaveOptions(parity=2),
    )
    assert len(list(tmp_path.glob("parity/*"))) == 2
    rows = reader().Checkpoint(tmp_path).array("rows")
    assert np.array_equal(rows, load_plain_tensors(tmp_path)["rows"].numpy())


def test_the_reader_shows_common_state_and_objects(tmp_path: Path) -> None:
    rng = ShardedObject("rng", {"seed": 3, "state": torch.arange(4, dtype=torch.uint8)}, (1, 2), (0, 1))
    first = ShardedObject("rng", {"seed": 2}, (1, 2), (0, 0))
    save({"lr": 0.5, "nested": {"names": ["a", "b"]}, "rng": [first, rng]}, tmp_path / "c")
    checkpoint = reader().Checkpoint(tmp_path / "c")
    assert checkpoint.common["state_dict"] == {"lr": 0.5, "nested": {"names": ["a", "b"]}}
    tree, tensors = checkpoint.objects("rng")[0, 1]
    assert tree["seed"] == 3
    assert [t.tolist() for t in tensors.values()] == [[0, 1, 2, 3]]
    assert load({"rng": rng}, tmp_path / "c")["rng"]["seed"] == 3


def test_the_reader_is_a_program_of_the_package_that_needs_no_torch(tmp_path: Path) -> None:
    """In an interpreter that cannot import torch, as where it is not installed."""
    save({"w": sharded("w", torch.arange(3)), "lr": 0.5}, tmp_path / "c")

    def run(*arguments: str) -> str:
        program = (
            "import sys, runpy; sys.modules['torch'] = None; "
            f"sys.argv = {['reader', str(tmp_path / 'c'), *arguments]!r}; "
            "runpy.run_module('megackpt.read_checkpoint', run_name='__main__')"
        )
        command = [sys.executable, "-c", program]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    listing = run()
    assert "int64  [3]                      w\n" in listing
    assert '"lr": 0.5' in listing
    assert run("w") == "[0 1 2]\n"
    assert (ROOT / "megackpt" / "read_checkpoint.py").samefile(PROGRAM)


def test_bfloat16_is_decoded_exactly_and_float8_comes_as_its_bits(tmp_path: Path) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scalar, eight = torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    values = {"all": bits, "scalar": scalar, "eight": eight}
    save({key: sharded(key, value) for key, value in values.items()}, tmp_path / "c")
    checkpoint = reader().Checkpoint(tmp_path / "c")
    assert np.array_equal(checkpoint.array("all"), bits.float().numpy(), equal_nan=True)
    assert (checkpoint.array("scalar").shape, checkpoint.array("scalar").item()) == ((), 1.5)
    assert checkpoint.array("all", np.s_[2**15 + 3]).dtype == np.float32
    assert checkpoint.array("eight").tolist() == eight.view(torch.uint8).tolist()


def test_a_slice_reads_only_the_chunks_that_hold_it(tmp_path: Path) -> None:
    save_on_ranks(3, lambda rank: {"rows": filled(float(rank), 4, key="rows", rank=rank, ranks=3)}, tmp_path)
    files = sorted((tmp_path / "data").iterdir())
    files[0].unlink()
    checkpoint = reader().Checkpoint(tmp_path)
    assert checkpoint.array("rows", np.s_[4:6]).tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        checkpoint.array("rows", 3)
    for index, error in ((np.s_[::2], IndexError), (12, IndexError), (np.s_[0, 0], ValueError)):
        with pytest.raises(error):
            checkpoint.array("rows", index)
