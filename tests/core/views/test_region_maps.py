"""Maps between families of names: rules and their proof, inverses, joins, requests in other names."""

from __future__ import annotations

import random

import pytest
import torch

from megackpt import MapError, ShardedTensor
from megackpt.geometry import Box
from megackpt.maps import Rule, bound_to, family_of, region_map
from megackpt.maps.requests import mapped_tensors
from tests.support.states import assembled, random_arrays

SIZES = {"q": 8, "h": 4, "i": 6, "expert": 3, "groups": 2, "r": 4, "d": 2, "v": 7}
CONV1D = [
    Rule(ours=f"attention.{part}", theirs="c_attn", axes="q h", their_axes=f"h ({number}/3 q)")
    for number, part in enumerate("qkv")
]
FUSED_EXPERTS = [
    Rule(ours=f"experts.{part}", theirs="gate_up", axes="expert i h", their_axes=f"expert h [i {number}/2]")
    for number, part in enumerate(("gate", "up"))
]
MODULES = [Rule(ours="down", theirs="experts.{expert}.down", axes="expert h i")]
INTERLEAVED = [
    Rule(ours="qkv.q", theirs="qkv", axes="(groups r) h", their_axes="(groups r@0/r+2d) h"),
    Rule(ours="qkv.k", theirs="qkv", axes="(groups d) h", their_axes="(groups d@r/r+2d) h"),
    Rule(ours="qkv.v", theirs="qkv", axes="(groups d) h", their_axes="(groups d@r+d/r+2d) h"),
]
RULES = [*CONV1D, *FUSED_EXPERTS, *MODULES, *INTERLEAVED]


def test_each_operation_takes_the_elements_that_its_axes_name() -> None:
    made = region_map(RULES, SIZES)
    made.check(name="all operations")
    theirs = random_arrays(made, 1)
    ours = assembled(made, theirs)
    assert torch.equal(ours["attention.k"], theirs["c_attn"].T[8:16])
    assert torch.equal(ours["experts.up"], theirs["gate_up"][..., 1::2].transpose(1, 2))
    assert torch.equal(ours["down"][2], theirs["experts.2.down"])
    grouped = theirs["qkv"].view(2, 8, 4)
    assert torch.equal(ours["qkv.q"], grouped[:, :4].reshape(8, 4))
    assert torch.equal(ours["qkv.v"], grouped[:, 6:].reshape(4, 4))


def test_a_map_and_its_inverse_give_the_same_bits() -> None:
    made = region_map(RULES, SIZES)
    theirs = random_arrays(made, 2)
    back = assembled(made.inverse(), assembled(made, theirs))
    for key, array in theirs.items():
        assert torch.equal(back[key].view(array.shape), array), key


def test_maps_are_joined_through_the_common_family() -> None:
    other = region_map([r for r in RULES if r.ours.startswith("qkv")], SIZES)
    split = region_map(
        [
            Rule(ours=f"qkv.{p}", theirs=f"{p}_proj", axes=a)
            for p, a in zip("qkv", ("q h", "r h", "r h"), strict=True)
        ],
        SIZES,
    )
    joined = other.inverse().joined(split)
    joined.check(name="joined")
    theirs = random_arrays(joined, 3)
    (fused,) = assembled(joined, theirs).values()
    assert torch.equal(
        fused.view(2, 8, 4)[1], torch.cat([theirs["q_proj"][4:], theirs["k_proj"][2:], theirs["v_proj"][2:]])
    )


def test_a_zero_centred_norm_is_added_to_and_taken_from() -> None:
    made = region_map([Rule(ours="norm", theirs="norm", axes="h", added=1)], SIZES)
    ours = assembled(made, {"norm": torch.zeros(4)})
    assert torch.equal(ours["norm"], torch.ones(4))
    assert torch.equal(assembled(made.inverse(), ours)["norm"], torch.zeros(4))


@pytest.mark.parametrize("seed", range(5))
def test_requests_of_boxes_and_flat_ranges_name_the_same_elements(seed: int) -> None:
    chance = random.Random(seed)
    made = region_map(RULES, SIZES)
    theirs = random_arrays(made, seed)
    ours = assembled(made, theirs)
    for key, array in ours.items():
        shape = array.shape
        start = [chance.randrange(n) for n in shape]
        extent = [chance.randint(1, n - a) for n, a in zip(shape, start, strict=True)]
        box = Box(tuple(start), tuple(extent))
        wanted = array[box.slices()]
        low = chance.randrange(wanted.numel())
        high = chance.randint(low, wanted.numel())
        for flat in (None, slice(low, high)):
            data = torch.zeros(extent) if flat is None else torch.zeros(high - low)
            tensor = ShardedTensor(
                key, data, data.dtype, box.shape, tuple(shape), box.start, flattened_range=flat
            )
            for part in mapped_tensors(tensor, key, made):
                region, into = part.theirs, part.theirs.data
                source = theirs[region.key].view(region.global_shape)
                assert into is not None
                into.copy_(source[Box(region.global_offset, region.local_shape).slices()])
            assert torch.equal(data, wanted if flat is None else wanted.flatten()[flat]), key


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (RULES[1:], r"'c_attn' \(4, 24\) \[0:4, 0:8\] is in no pair"),
        ([*RULES, MODULES[0]], r"'down' .* is in more than one pair"),
        ([Rule(ours="a", theirs="b", axes="q h", their_axes="q i")], r"axes \['h', 'q'\] of ours are not"),
        ([Rule(ours="a", theirs="b", axes="unknown")], "'unknown' has no size"),
        ([*CONV1D, Rule(ours="x", theirs="c_attn", axes="q")], "'c_attn' has the shape"),
    ],
    ids=["a hole", "twice", "other axes", "no size", "two shapes"],
)
def test_rules_that_are_no_bijection_are_an_error(rules: list[Rule], text: str) -> None:
    with pytest.raises(MapError, match=text):
        region_map(rules, SIZES).check(name="faulty")


LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def test_layers_are_stacked_where_a_model_stacks_them() -> None:
    made = family_of(LLAMA).region_map(LLAMA)
    bound = bound_to(made, {"decoder.layers.mlp.linear_fc2.weight"})
    bound.check(name="bound")
    assert bound.left["decoder.layers.mlp.linear_fc2.weight"].stored == (3, 32, 48)
    assert "decoder.layers.2.input_layernorm.weight" in bound.left
    (pair,) = bound.pairs_within("decoder.layers.mlp.linear_fc2.weight", Box((1, 0, 8), (1, 32, 8)))
    assert pair.right.key == "model.layers.1.mlp.down_proj.weight"
    assert pair.right.box == Box((0, 8), (32, 8))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"vocab_size": None}, "has no vocab_size"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide"),
        ({"model_type": "unheard"}, "No map is for model_type 'unheard'"),
    ],
)
def test_a_config_that_makes_no_sense_is_an_error(change: dict[str, object], text: str) -> None:
    config = LLAMA | change
    with pytest.raises(MapError, match=text):
        family_of(config).region_map(config)
