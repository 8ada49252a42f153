"""Helpers for state dicts by Megatron-Core's names."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from megackpt.compat.megatron.dist_checkpointing import (
    mapping,
    state_dict_utils,
    utils,
)
from tests.contrib.megatron.small_state import halves, small_state

S, F = mapping.ShardedTensor, mapping.ShardedTensorFactory


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
