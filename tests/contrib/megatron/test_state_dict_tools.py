"""Helpers for nested values, state dicts, flat ranges and layers' keys, by Megatron-Core's names."""

from __future__ import annotations

import logging
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.dist_checkpointing import dict_utils as d
from megackpt.contrib.megatron.dist_checkpointing import (
    gpt_checkpoint_interop,
    mapping,
    state_dict_utils,
    utils,
)
from megackpt.contrib.megatron.dist_checkpointing.strategies import resharding
from megackpt.errors import CheckpointingException
from tests.contrib.megatron.small_state import halves, small_state

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory
SHAPE = (4, 6)
WHOLE = torch.arange(24.0).reshape(SHAPE)
LAYERS = torch.stack([WHOLE, -WHOLE])


def _is_int(x: object) -> bool:
    return isinstance(x, int)


def test_matching_and_other_values_keep_the_structure() -> None:
    tree = {"a": 1, "b": {"c": "x", "d": [2, "y", []]}, "e": {}, "f": (3,)}
    matching, others = d.extract_matching_values(tree, _is_int)
    assert matching == {"a": 1, "b": {"d": [2]}}
    assert others == {"b": {"c": "x", "d": ["y", []]}, "e": {}, "f": (3,)}
    matching, others = d.extract_matching_values(["x", 5], _is_int, return_lists_as_dicts=True)
    assert (matching, others) == ({1: 5}, {0: "x"})
    with pytest.raises(ValueError, match="dict or a list is expected at the top, not int"):
        d.extract_matching_values(3, _is_int)  # type: ignore[arg-type]


def test_a_difference_is_named_by_its_path() -> None:
    left = {"a": 1, "b": [1, 2, 3], "t": torch.zeros(2), "n": np.zeros(2), "only": 0}
    right = {"a": 1, "b": [1, 5], "t": torch.ones(2), "n": np.zeros(2), "new": 0}
    only_left, only_right, mismatch = d.diff(left, right)
    assert set(only_left) == {("only",), ("b", 2)}
    assert only_right == [("new",)]
    assert {path for path, *_ in mismatch} == {("b", 1), ("t",)}
    assert d.diff(left, left) == ([], [], [])


def test_types_are_printed_as_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    d.inspect_types({"a": [torch.zeros(2, 3)], "b": "x" * 40})
    printed = capsys.readouterr().out
    assert "> a: \n    - 0: Tensor of shape (2, 3)" in printed
    assert f"> b: [<class 'str'>]: {'x' * 30}... (truncated)" in printed


def test_values_are_visited_and_mapped_in_order() -> None:
    tree = {"a": 1, "b": [2, {"c": 3}]}
    assert list(d.nested_values(tree)) == [1, 2, 3]
    assert [key for _, key, _ in d.nested_items_iter(tree)] == ["a", 0, "c"]
    doubled = d.dict_list_map_outplace(lambda x: 2 * x, tree)
    assert (doubled, tree["a"]) == ({"a": 2, "b": [4, {"c": 6}]}, 1)
    inner = tree["b"]
    assert d.dict_list_map_inplace(lambda x: x + 1, tree) is tree
    d.dict_map(lambda x: 10 * x, tree)
    d.dict_map_with_key(lambda key, x: f"{key}{x}", tree)
    assert tree == {"a": "a20", "b": ["030", {"c": "c40"}]}
    assert tree["b"] is inner
    assert d.dict_list_map_inplace(str, 3) == "3"


def test_merging_is_in_place_and_rejects_two_values_at_one_path() -> None:
    base = {"a": {"b": 1}, "l": [{"x": 1}, {}]}
    assert d.merge(base, {"a": {"c": 2}, "l": [{}, {"y": 2}], "d": 3}) is base
    assert base == {"a": {"b": 1, "c": 2}, "l": [{"x": 1}, {"y": 2}], "d": 3}
    with pytest.raises(ValueError, match=r"At \('a', 'b'\): both have a value"):
        d.merge(base, {"a": {"b": 4}})
    with pytest.raises(ValueError, match="lists of 2 and 1 elements"):
        d.merge(base, {"l": [{}]})


def test_map_reduce_groups_by_key() -> None:
    assert d.map_reduce([1, 2, 3], lambda x: x % 2, lambda x: x * x, sum) == {1: 10, 0: 4}
    assert d.map_reduce([1, 1]) == {1: [1, 1]}


def test_factories_are_applied_and_merged_in_place() -> None:
    state = {"a": [F("k", torch.arange(4.0), halves, torch.cat)], "b": 1}
    factories = {"a": {0: state["a"][0]}}
    mapping.apply_factories(state)
    assert [t.data.tolist() for t in state["a"][0]] == [[0.0, 1.0], [2.0, 3.0]]
    loaded = {"a": [[torch.ones(2), torch.zeros(2)]], "b": 1}
    assert mapping.apply_factory_merges(loaded, factories) is loaded
    assert loaded["a"][0].tolist() == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="where nothing was loaded"):
        mapping.apply_factory_merges({"a": []}, factories)
    with pytest.raises(ValueError, match="lists of 1 and 0"):
        mapping.apply_factory_merges({"a": [1]}, {"a": []})
    with pytest.raises(ValueError, match="not a factory to merge"):
        mapping.apply_factory_merges({"a": 1}, {"a": 2})


def test_state_dicts_are_taken_apart_without_changing_them() -> None:
    state = {**small_state(), "content_metadata": {"v": 1, "dp_cp_group": object()}}
    sharded, common = state_dict_utils.save_preprocess(state)
    assert [t.key for t in sharded["model"]["fused"]] == ["fused.0", "fused.1"]
    assert common == {"step": 7, "content_metadata": {"v": 1}}
    wanted, local, factories = state_dict_utils.load_preprocess(state)
    assert (wanted["step"], local) == (7, {"local": "mine"})
    assert factories["model"]["fused"].data is None
    assert isinstance(state["model"]["fused"], F)
    assert state["model"]["fused"].data is not None


def test_flat_shards_without_elements_are_filtered_out() -> None:
    flat = partial(S.from_rank_offsets_flat, non_flat_local_shape=(2, 2))
    state = {
        "none": flat("a", torch.zeros(0), flattened_range=slice(2, 2)),
        "some": flat("b", torch.zeros(2), flattened_range=slice(2, 4)),
        "else": 1,
    }
    assert set(state_dict_utils.filter_out_empty_flatten_tensor(state)) == {"some", "else"}


def test_keys_are_renamed_in_place() -> None:
    state = {
        "a": S.from_rank_offsets("x.a", torch.zeros(1)),
        "b": [mapping.ShardedObject("x.b", 1, (1,), (0,))],
        "c": "x.c",
    }
    utils.add_prefix_for_sharding(state, "p.")
    utils.replace_prefix_for_sharding(state, "p.x.", "q.")
    utils.apply_prefix_mapping(state, {"q.a": "r", "q": "s", "r": "t"})
    assert (state["a"].key, state["b"][0].key, state["c"]) == ("r", "s.b", "x.c")
    with pytest.raises(ValueError, match=r"'s.b' does not begin with 'r'"):
        utils.replace_prefix_for_sharding(state, "r", "u")
    assert state["a"].key == "r", "no key may change where one does not fit"


def test_entities_are_picked_out_by_kind() -> None:
    state = small_state()
    assert set(utils.extract_sharded_tensors(state)[0]["model"]) == {"w"}
    assert set(utils.extract_sharded_tensors_and_factories(state)[0]["model"]) == {"w", "fused"}
    assert set(utils.extract_sharded_tensors_or_nonpersistent(state)[0]) == {"model", "local"}
    assert utils.extract_sharded_base(state)[1] == {"local": state["local"], "step": 7}
    assert set(utils.extract_nonpersistent(state)[0]) == {"local"}
    assert list(utils.zip_strict([1], [2])) == [(1, 2)]
    with pytest.raises(ValueError, match=r"\[1, 0\] elements"):
        utils.zip_strict([1], [])


def test_logging_nests_names_and_loggers(caplog: pytest.LogCaptureFixture) -> None:
    own_logger = logging.getLogger("mine")
    with caplog.at_level(logging.DEBUG):
        with utils.logger_stack("outer", own_logger), utils.debug_time("inner"):
            utils.debug_msg("hello")
        with (
            utils.debug_time("slow", own_logger, threshold=0.0),
            utils.debug_time("never", own_logger, threshold=1e9),
        ):
            pass
    lines = [(r.name, r.levelname, r.getMessage().split(" took")[0]) for r in caplog.records]
    assert lines == [
        ("mine", "DEBUG", "outer.inner hello"), ("mine", "DEBUG", "outer.inner"), ("mine", "WARNING", "slow"),
    ]  # fmt: skip


def parts(chunks: tuple[int, int], *, cut: int, layers: bool = False) -> dict[str, Any]:
    """Return the flat ranges, two of each chunk, of an array in so many chunks along each dim."""
    values: dict[str, Any] = {}
    chunk = tuple(extent // count for extent, count in zip(SHAPE, chunks, strict=True))
    for layer, row, column in product(range(1 + layers), range(chunks[0]), range(chunks[1])):
        source = LAYERS[layer] if layers else WHOLE
        box = source[row * chunk[0] :, column * chunk[1] :][: chunk[0], : chunk[1]].reshape(-1)
        offsets = [(int(layers), row, chunks[0]), (1 + int(layers), column, chunks[1])]
        for flat in (slice(0, cut), slice(cut, box.numel())):
            values[f"{layer}.{row}.{column}.{flat.start}"] = S.from_rank_offsets_flat(
                "w",
                box[flat].clone(),
                chunk,
                *([(0, layer, 2)] if layers else []),
                *offsets,
                flattened_range=flat,
                prepend_axis_num=int(layers),
            )
    return values


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("stored", [(1, 1), (2, 3), (4, 2)])
def test_flat_ranges_are_taken_out_of_the_chunks_of_another_layout(
    tmp_path: Path, stored: tuple[int, int], layers: bool
) -> None:
    path = str(tmp_path / "c")
    dist_checkpointing.save(parts(stored, cut=2, layers=layers), path)
    shape = ((2,) if layers else ()) + SHAPE
    grid = ((2,) if layers else ()) + stored
    numel = 24 // (stored[0] * stored[1])
    metadata = {"w": resharding.TensorReformulationMetadata(shape, (*grid, numel))}
    for asked in [(1, 1), (2, 3), (2, 1), (4, 3), (1, 6)]:
        wanted = parts(asked, cut=1, layers=layers)
        expected = {key: part.data for key, part in wanted.items()}
        request = {"model": {key: part.without_data() for key, part in wanted.items()}}
        first = next(iter(request["model"].values()))
        is_same = asked == stored
        reformulated = resharding.nd_flattened_tensor_reformulated_global_shape(first)
        assert (reformulated == metadata["w"].ckpt_reform_global_shape) == is_same
        request, restore = resharding.apply_nd_flattened_tensors_reformulation(request, metadata)
        assert (restore == {}) == is_same
        loaded = dist_checkpointing.load(request, path)
        restored = resharding.restore_nd_flattened_tensors_formulation(loaded, restore)
        assert set(restored["model"]) == set(expected)
        assert all(torch.equal(restored["model"][key], data) for key, data in expected.items())


def test_what_does_not_fit_raises_an_error() -> None:
    flat = next(iter(parts((2, 3), cut=2).values()))
    plain = S.from_rank_offsets("p", torch.zeros(3))
    assert [resharding.is_nd_flattened_tensor(x) for x in (flat, plain, 7)] == [True, False, False]
    with pytest.raises(CheckpointingException, match="'p' is no flat range"):
        resharding.nd_flattened_tensor_reformulated_global_shape(plain)
    with pytest.raises(CheckpointingException, match="'w' has no reformulation metadata"):
        resharding.apply_nd_flattened_tensors_reformulation({"w": flat}, {})
    with pytest.raises(CheckpointingException, match="ckpt_orig_global_shape is empty"):
        resharding.TensorReformulationMetadata((), (1,))
    for shape, reformed in [((4, 6), (3, 2, 4)), ((4, 6), (2, 12)), ((4, 6), (2, 3, 5)), ((4, 6), (0, 3, 4))]:
        wrong = resharding.TensorReformulationMetadata(shape, reformed)
        with pytest.raises(CheckpointingException, match="when it is reformulated"):
            resharding.reformulate_single_nd_flattened_tensor(flat, wrong)
    other = resharding.TensorReformulationMetadata((2, 4, 6), (2, 2, 3, 4))
    with pytest.raises(CheckpointingException, match="dims have to be the same"):
        resharding.reformulate_single_nd_flattened_tensor(flat, other)


def test_a_hybrid_model_reads_the_checkpoint_of_a_gpt(tmp_path: Path) -> None:
    path = str(tmp_path / "gpt")
    weight = torch.arange(12.0).reshape(2, 2, 3)
    stored: dict[str, Any] = {
        "mlp": S.from_rank_offsets("decoder.layers.mlp.w", weight),
        "attention": S.from_rank_offsets("decoder.layers.self_attention.w", -weight),
        "norm": S.from_rank_offsets("decoder.final_layernorm.weight", torch.ones(3)),
        **{
            f"extra{i}": mapping.ShardedObject("decoder.layers.mlp._extra_state", i, (2,), (i,))
            for i in (0, 1)
        },
    }
    dist_checkpointing.save(stored, path, ("torch_dist", 1))
    maps = gpt_checkpoint_interop.gpt_compatible_layer_maps("M*-|M*-")
    assert maps.num_gpt_layers == 2
    assert (dict(maps.attention_to_gpt), dict(maps.mlp_to_gpt)) == ({1: 0, 4: 1}, {2: 0, 5: 1})
    parts = F(
        "decoder.layers.5.mlp.w",
        torch.zeros(2, 3),
        lambda key, data, replica, flat: [
            S.from_rank_offsets(key, data[i : i + 1], (0, i, 2), replica_id=replica) for i in range(2)
        ],
        torch.cat,
    )
    model: dict[str, Any] = {
        "fresh": S.from_rank_offsets("decoder.layers.0.mixer.A", torch.full((2,), 5.0)),
        "attention": S.from_rank_offsets("decoder.layers.4.self_attention.w", torch.zeros(2, 3)),
        "mlp": S.from_rank_offsets("decoder.layers.2.mlp.w", torch.zeros(2, 3)),
        "factory": parts,
        "norm": S.from_rank_offsets("decoder.final_norm.weight", torch.zeros(3)),
        "head": mapping.ShardedObject("output_layer._extra_state", "mine", (1,), (0,)),
        "extra": mapping.ShardedObject("decoder.layers.5.mlp._extra_state", None, (1,), (0,)),
    }
    gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint(model, maps)
    loaded = dist_checkpointing.load(model, path)
    assert loaded["fresh"].tolist() == [5.0, 5.0]
    assert torch.equal(loaded["attention"], -weight[1])
    assert torch.equal(loaded["mlp"], weight[0])
    assert torch.equal(loaded["factory"], weight[1])
    assert loaded["norm"].tolist() == [1.0] * 3
    assert (loaded["head"], loaded["extra"]) == ("mine", 1)


def test_plain_names_of_a_hybrid_model_become_those_of_a_gpt() -> None:
    maps = gpt_checkpoint_interop.gpt_compatible_layer_maps("M*-")
    rename = gpt_checkpoint_interop.retarget_fsdp_state_dict_to_gpt_checkpoint
    state = {
        "module.decoder.layers.0.mixer.A": 0,
        "module.decoder.layers.1.self_attention.w": 1,
        "module.decoder.final_norm.weight": 2,
        "state": [{"decoder.layers.2.mlp.w": {"exp_avg": 3}}],
    }
    assert rename(state, maps) == {
        "module.decoder.layers.0.self_attention.w": 1,
        "module.decoder.final_layernorm.weight": 2,
        "state": [{"decoder.layers.0.mlp.w": {"exp_avg": 3}}],
    }
    keys = ["model.module.module.decoder.layers.0.self_attention.w"]
    assert rename(state, maps, keys, "model") == {
        "module.module.decoder.layers.0.self_attention.w": 1,
        "state": [{"decoder.layers.0.mlp.w": {}}],
    }
    outside = {"x": S.from_rank_offsets("decoder.layers.9.mlp.w", torch.zeros(1))}
    with pytest.raises(ValueError, match="layer 9, which the hybrid pattern does not have"):
        gpt_checkpoint_interop.retarget_sharded_state_dict_to_gpt_checkpoint(outside, maps)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*-/*", "several tokens"),
        ("*-G", "'G'"),
        ("*-*E", "both"),
        ("M", "0 attention"),
        ("**-", "2 attention"),
    ],
)
def test_a_pattern_that_fits_no_gpt_is_an_error(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        gpt_checkpoint_interop.gpt_compatible_layer_maps(pattern)
