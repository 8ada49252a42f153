"""docs/read_checkpoint.py, which knows only docs/format.md, agrees with load."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megackpt import SaveOptions, ShardedObject, ShardedTensor, load, load_plain_tensors, save
from megackpt.comm import Group
from megackpt.engine.tensor_bytes import as_bits, byte_view
from megackpt.testing.layouts import arrays, held_chunks
from megackpt.testing.world import SimulatedWorld

HAS_DIGESTS = importlib.util.find_spec("awscrt") is not None
PROGRAM = Path(__file__).parents[2] / "docs" / "read_checkpoint.py"


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


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), array=arrays(max_dims=3), ranks=st.integers(1, 3))
def test_the_reader_agrees_with_load_at_any_layout(
    data: st.DataObject, array: torch.Tensor, ranks: int, tmp_path_factory: object
) -> None:
    layout = data.draw(held_chunks(tuple(array.shape), ranks=ranks))
    options = SaveOptions(array_digests=HAS_DIGESTS and data.draw(st.booleans()))  # it knows nothing of them
    directory = tmp_path_factory.mktemp("reader")  # type: ignore[attr-defined]
    SimulatedWorld(ranks).run(
        lambda group: save(
            {"shards": [h.declare("k", array) for h in layout if h.rank == group.rank]},
            directory,
            options=options,
            group=group,
        )
    )
    theirs = reader().Checkpoint(directory).array("k")
    ours = load_plain_tensors(directory)["k"]
    assert theirs.shape == tuple(ours.shape)
    assert np.ascontiguousarray(theirs).tobytes() == bytes(byte_view(as_bits(ours)))


def test_the_reader_passes_over_parity(tmp_path: Path) -> None:
    def save_rank(group: Group) -> None:
        rows = ShardedTensor.from_rank_offsets("rows", torch.arange(6.0) + group.rank, (0, group.rank, 3))
        save({"rows": rows}, tmp_path, options=SaveOptions(parity=2), group=group)

    SimulatedWorld(3).run(save_rank)
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


def test_the_reader_is_a_program_that_lists_a_checkpoint(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(3)), "lr": 0.5}, tmp_path / "c")
    command = [sys.executable, str(PROGRAM), str(tmp_path / "c")]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "int64  [3]                      w\n" in listing
    assert '"lr": 0.5' in listing
    assert subprocess.run([*command, "w"], check=True, capture_output=True, text=True).stdout == "[0 1 2]\n"
