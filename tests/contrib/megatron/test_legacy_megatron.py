"""Folders that Megatron-LM writes with `--ckpt-format torch` are checkpoints with the names of torch_dist.

Real models of Megatron-Core are written as `training/checkpointing.py` writes them, and loaded by real
models at other layouts. Sizes of stages and interleaved chunks come from crafted files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt import FormatError
from megackpt.errors import UnsupportedError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron import megatron_world as world
from tests.contrib.megatron.megatron_world import Case, Layout

CASES = [
    Case("rmsnorm-swiglu-gqa-rope-untied"),
    Case("layernorm-gelu-learned-tied", norm="LayerNorm", tied=True, rope=False, swiglu=False),
]


@pytest.mark.usefixtures("megatron_core")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("source", [Layout(tp=2, pp=2), Layout(pp=2), Layout()], ids=str)
def test_a_real_model_is_loaded_at_another_layout(
    case: Case, source: Layout, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "iter_0000007")
    rank_pool.run(world.save_legacy, source.ranks, case, source, path)
    stored = megackpt.load_plain_tensors(path)
    for key, value in stored.items():
        assert torch.equal(value, world.oracle(key, tuple(value.shape))), key
    for target in (Layout(tp=2), Layout(pp=2), Layout()):
        assert all(rank_pool.run(world.load_legacy, target.ranks, case, target, path)), target


OPTIONS = {"swiglu": True, "untie_embeddings_and_output_weights": True, "encoder": {"deep": [1, (2.5, None)]}}


def _write(folder: Path, tp: int, stages: list[list[int]], **options: Any) -> dict[str, torch.Tensor]:
    """Write a model whose stages have chunks of so many layers; return its whole weights."""
    order = [(chunk, stage) for chunk in range(len(stages[0])) for stage in range(len(stages))]
    first, total = {}, 0
    for chunk, stage in order:
        first[chunk, stage] = total
        total += stages[stage][chunk]
    whole = {
        "decoder.layers.mlp.linear_fc1.weight": torch.randn(total, 2 * 4 * tp, 3),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(total, 3, 4 * tp),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": torch.randn(total, 3),
        "embedding.word_embeddings.weight": torch.randn(6 * tp, 3),
    }
    fc1, fc2, norm, embedding = whole.values()
    for stage, chunks in enumerate(stages):
        for rank in range(tp):
            value: dict[str, Any] = {
                "args": argparse.Namespace(tensor_model_parallel_size=tp, **{**OPTIONS, **options}),
                "iteration": 12,
                "optimizer": {"step": 3},
            }
            for chunk, count in enumerate(chunks):
                state = {}
                for layer in range(count):
                    at = first[chunk, stage] + layer
                    name = f"decoder.layers.{layer}.mlp"
                    gates, rest = fc1[at].chunk(2)
                    state[f"{name}.linear_fc1.weight"] = torch.cat(
                        [gates.chunk(tp)[rank], rest.chunk(tp)[rank]]
                    )
                    state[f"{name}.linear_fc2.weight"] = fc2[at].chunk(tp, 1)[rank]
                    state[f"{name}.linear_fc1.layer_norm_weight"] = norm[at]
                    state[f"{name}.linear_fc1._extra_state"] = None
                if stage == chunk == 0:
                    state["embedding.word_embeddings.weight"] = embedding.chunk(tp)[rank]
                value["model" if len(chunks) == 1 else f"model{chunk}"] = state
            stage_name = f"_{stage:03d}" if len(stages) > 1 else ""
            path = folder / f"mp_rank_{rank:02d}{stage_name}"
            path.mkdir(parents=True)
            torch.save(value, path / "model_optim_rng.pt")
    return whole


@pytest.mark.parametrize(
    ("tp", "stages"),
    [
        (1, [[2]]),
        (1, [[1] * 12]),
        (2, [[3]]),
        (2, [[1], [3], [2]]),
        (1, [[1, 2], [2, 1]]),
        (2, [[1, 1], [1, 1]]),
    ],
    ids=str,
)
def test_weights_are_put_together_of_all_ranks_stages_and_chunks(
    tp: int, stages: list[list[int]], tmp_path: Path
) -> None:
    whole = _write(tmp_path / "iter_0000012", tp, stages)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    for path in (tmp_path, tmp_path / "iter_0000012"):
        loaded = megackpt.load_plain_tensors(path)
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[key], value) for key, value in whole.items())
    report = megackpt.convert(tmp_path / "iter_0000012", tmp_path / "new", "torch_dist")
    assert report.left_out == ("optimizer (it is of each rank)",)
    common = megackpt.load_common_state_dict(tmp_path / "new")
    assert common["iteration"] == 12
    assert vars(common["args"]) == {"tensor_model_parallel_size": tp, **OPTIONS}


@pytest.mark.parametrize("rows", [4, 8], ids=["plain", "gated"])
def test_whether_an_mlp_has_gates_is_seen_by_its_shapes(rows: int, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"mp_rank_{rank:02d}"
        folder.mkdir()
        fc1 = torch.arange(rows) + 100 * rank
        weights = {"mlp.linear_fc1.weight": fc1[:, None], "mlp.linear_fc1.bias": fc1}
        weights["mlp.linear_fc2.weight"] = torch.ones(1, 4)
        torch.save(
            {"args": None, "model": {f"a.{k}": v for k, v in weights.items()}}, folder / "model_optim_rng.pt"
        )
    gates = [0, 1, 2, 3, 100, 101, 102, 103]
    expected = gates if rows == 4 else [*gates, *(n + 4 for n in gates)]
    loaded = megackpt.load_plain_tensors(tmp_path)
    assert loaded["a.mlp.linear_fc1.bias"].tolist() == expected
    assert loaded["a.mlp.linear_fc1.weight"].flatten().tolist() == expected


@pytest.mark.parametrize("size", ["two", None, 10**12])
def test_arguments_that_cannot_be_are_one_error(size: Any, tmp_path: Path) -> None:
    _write(tmp_path, 1, [[1]], pipeline_model_parallel_size=size)
    with pytest.raises(FormatError, match=r"do not have the layout of Megatron-LM|ranks are missing"):
        megackpt.inspect(tmp_path)


def test_files_without_those_of_the_first_rank_are_an_error(tmp_path: Path) -> None:
    _write(tmp_path, 2, [[1]])
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match="as mp_rank_00_000"):
        megackpt.inspect(tmp_path)


def test_layers_that_differ_keep_keys_of_their_own(tmp_path: Path) -> None:
    _write(tmp_path, 1, [[2]])
    file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    value["model"]["decoder.layers.1.mlp.linear_fc2.bias"] = torch.ones(3)
    torch.save(value, file)
    assert "decoder.layers.1.mlp.linear_fc2.weight" in megackpt.load_plain_tensors(tmp_path)


def test_what_is_not_whole_or_not_known_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path / "a", 2, [[1], [1]])
    (tmp_path / "a" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=r"files of 1 ranks are missing, as mp_rank_01_001"):
        megackpt.load_plain_tensors(tmp_path / "a")
    _write(tmp_path / "b", 2, [[1]])
    file = tmp_path / "b" / "mp_rank_01" / "model_optim_rng.pt"
    value = torch.load(file, weights_only=False)
    norm = value["model"].pop("decoder.layers.0.mlp.linear_fc1.layer_norm_weight")
    value["model"]["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] = norm + 1
    torch.save(value, file)
    with pytest.raises(FormatError, match=r"layer_norm_weight' has other bits than in"):
        megackpt.load_plain_tensors(tmp_path / "b")
    value["model"]["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] = norm
    value["model"]["decoder.layers.0.mixer.in_proj.weight"] = torch.ones(2)
    torch.save(value, file)
    with pytest.raises(
        UnsupportedError, match=r"mixer\.in_proj\.weight' is a weight that ranks divide in an unknown way"
    ):
        megackpt.load_plain_tensors(tmp_path / "b")
    (tmp_path / "b" / "mp_rank_01").rename(tmp_path / "b" / "mp_rank_00_000_001")
    with pytest.raises(UnsupportedError, match="experts are divided over ranks"):
        megackpt.load_plain_tensors(tmp_path / "b")
