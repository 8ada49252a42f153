"""Small models of transformers with random weights, our arrays of them, and the logits of ours."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megackpt import DeclarationError
from megackpt.entities import ShardedStateDict
from megackpt.maps import RegionMap, family_of
from megackpt.training.parallel import (
    Axis,
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    StageTable,
    context_share,
    forward_backward,
)
from megackpt.training.parallel.collectives import gather_from
from megackpt.training.parallel.context import gather_context
from models import GPTConfig, T5Config, build_gpt
from models.huggingface import gpt_config
from tests.support.gpt import Box, assert_all_close, gradient_boxes, join
from tests.support.gpt import assert_close as assert_gradient_close
from tests.support.huggingface_configs import DENSE, SEQUENCE, WITH_EXPERTS, random_fields
from tests.support.huggingface_folders import stacked_map
from tests.support.optimizers import Arrays, tensors_of
from tests.support.states import assembled

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # before it is imported; it prints notes

RELATIVE = 1e-5
SCAN_RELATIVE = 1e-4
"""Of models with a recurrence, whose errors of rounding go on from token to token."""
FAMILIES = (*(family for family in DENSE if family != "gemma"), *WITH_EXPERTS)
SEEDS = 6  # configs of each family


def layout_of(config: GPTConfig) -> ParallelLayout:
    """Return a layout of 4 ranks with as many kinds of cuts as a config allows."""
    if config.moe is not None:
        layouts = [ParallelLayout(tp=2, pp=2, ep=2, etp=1), ParallelLayout(pp=2, cp=2, ep=2)]
        if config.delta_net is not None:  # with an odd number of heads
            layouts.append(ParallelLayout(pp=2, dp=2, etp=1))
    else:
        layouts = [ParallelLayout(tp=2, pp=2)]
    for layout in layouts:
        try:
            config.check_layout(layout)
        except DeclarationError:
            continue
        return layout
    return ParallelLayout(pp=2, cp=2)


def random_config(family: str, seed: int) -> Any:
    """Return a transformers config of odd sizes; that of seed 0 can be cut into 2 for tp and for pp."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **random_fields(family, seed))
    config._experts_implementation = config._attn_implementation = "eager"
    return config


def random_model(config: Any, seed: int) -> nn.Module:
    """Return a model with random weights, biases and norms, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    if config.model_type not in DENSE:
        randomise(model, seed)
        return model
    return randomised(model, seed)


def randomised(model: nn.Module, seed: int, *, spread: float = 0.4) -> nn.Module:
    """Return a model whose weights, biases and norms are made random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            # Matrices keep the size of what they multiply; norms are 1 (0 if zero-centred) and some.
            param.copy_(param + spread * noise if param.ndim == 1 else noise / param.shape[-1] ** 0.5)
            assert param.abs().max() > 0, name
    return model


def randomise(module: nn.Module, seed: int) -> None:
    """Set all parameters, norms and biases too, to random values that differ from their initial ones.

    Matrices keep the size of what goes through them; scores of routers are far from each other, so that
    rounding changes no choice.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.add_(0.3 * noise)  # to 1, or 0 if it is zero-centred
            elif param.ndim == 1 or name.endswith("_bias"):
                param.copy_(0.5 * noise)
            else:
                param.copy_(noise * param.shape[-1] ** -0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def arrays_in_our_names(model: nn.Module) -> Arrays:
    """Return the weights of a transformers model as our arrays, by its map; equal layers are stacked."""
    config = json.loads(model.config.to_json_string())
    state = {_saved_name(key, config): value.detach() for key, value in model.state_dict().items()}
    made = stacked_map(config, list(state))
    return assembled(made, {key: state[key] for key in made.right})


def part_in_our_names(made: RegionMap, state: Mapping[str, Tensor]) -> Arrays:
    """Return the arrays that a map makes of some of the weights of a model."""
    pairs = [pair for pair in made.pairs if pair.right.key in state]
    left = {pair.left.key: made.left[pair.left.key] for pair in pairs}
    part = RegionMap(left, {key: made.right[key] for key in state}, tuple(pairs))
    return assembled(part, {key: value.detach() for key, value in state.items()})


def experts_in_our_names(state: Mapping[str, Tensor], config: Any) -> Arrays:
    """Return the arrays of a layer of experts, by their names in the layer."""
    sparse = {"mlp_only_layers": [], "decoder_sparse_step": 1, "first_k_dense_replace": 0}
    document = json.loads(config.to_json_string()) | sparse
    named = {f"model.layers.0.mlp.{name}": value for name, value in state.items()}
    made = family_of(document).region_map(document, list(named))
    arrays = part_in_our_names(made, named)
    return {key.removeprefix("decoder.layers.0.mlp."): array for key, array in arrays.items()}


def _saved_name(key: str, config: Mapping[str, Any]) -> str:
    """Return the name in a folder, which differs from that of the parameter in Nemotron-H."""
    is_hybrid = config["model_type"] == "nemotron_h"
    return key.replace("model.", "backbone.", 1) if is_hybrid and key.startswith("model.") else key


def fill(declared: ShardedStateDict | Iterable[ShardedStateDict], arrays: Arrays) -> set[str]:
    """Fill the parameters of one rank with its boxes of the arrays; return the keys of those it has."""
    keys = set()
    for tensor in tensors_of(declared):
        array, box = arrays[tensor.key], tensor.global_slice()
        assert tensor.data is not None
        if tensor.allow_shape_mismatch:
            start, stop, _ = box[0].indices(len(array))
            tensor.data.detach()[: stop - start] = array[start:stop]
        else:
            assert tuple(array.shape) == tensor.global_shape, tensor.key
            tensor.data.detach().copy_(array[box].view(tensor.data.shape))
        keys.add(tensor.key)
    return keys


def token_ids(vocab_size: int) -> Tensor:
    """Return token ids `[b, s]`."""
    return torch.randint(0, vocab_size, (2, SEQUENCE), generator=torch.Generator().manual_seed(5))


@functools.cache
def reference(family: str, seed: int) -> tuple[GPTConfig, Arrays, Tensor]:
    """Return our config, the weights as our arrays, and the logits `[b, s, vocab]` of transformers."""
    config = random_config(family, seed)
    model = random_model(config, seed)
    ours = gpt_config(json.loads(config.to_json_string()))
    if ours.seq_length < SEQUENCE:  # drawn with a scaling for longer sequences
        ours = replace(ours, seq_length=SEQUENCE)
    ours = replace(ours, make_vocab_divisible=1)
    with torch.no_grad():
        return ours, arrays_in_our_names(model), model(token_ids(ours.vocab_size), use_cache=False).logits


def relative_error_of(config: GPTConfig) -> float:
    """Return the largest error of results of a model, relative to the largest of them."""
    return RELATIVE if config.delta_net is None else SCAN_RELATIVE


def stays_in_float32(key: str) -> bool:
    """Whether an array of ours or theirs is float32 in a model in bfloat16."""
    return key.endswith((".expert_bias", ".e_score_correction_bias", ".A_log", ".D", ".dt_bias"))


def assert_close(actual: Any, expected: Tensor, relative: float = RELATIVE) -> None:
    """Compare logits, numpy's with torch's, relative to the largest one."""
    assert actual.shape == tuple(expected.shape)  # a difference of unequal shapes would be broadcast
    error = (torch.from_numpy(actual) - expected).abs().max() / expected.abs().max()
    assert error <= relative, f"off by {error:.1e} of the largest logit"


def logits(config: GPTConfig, weights: Any, layout: ParallelLayout, sequence_parallel: bool = False) -> Any:
    """Return the logits `[b, s, vocab]` of our model, of ranks of the last stage; of others None."""
    groups = ParallelGroups.create(layout)
    model = build_gpt(config, groups, sequence_parallel=sequence_parallel)
    keys = fill(model.sharded_state_dict(), {key: torch.from_numpy(array) for key, array in weights.items()})
    assert layout.pp > 1 or keys == weights.keys()
    return logits_of(model, config, groups)


def logits_of(model: ModelChunks, config: GPTConfig, groups: ParallelGroups) -> Any:
    """Return the logits of `logits` of a model with weights."""
    batch = token_ids(config.vocab_size).chunk(groups.dp.size)[groups.dp.rank]
    out = _outputs(model, context_share(batch, groups.cp, dim=1), groups)
    if out is None:
        return None
    return gather_context(out, groups.cp, dim=0).transpose(0, 1)[..., : config.vocab_size].numpy()


def _outputs(model: ModelChunks, tokens: Tensor, groups: ParallelGroups) -> Tensor | None:
    """Return the outputs `[s / cp, b, vocab]` for tokens of this rank, of ranks of the last stage."""
    (chunk,) = model
    inputs, pp = tokens, groups.pp
    with torch.no_grad():
        if not pp.is_first:
            inputs = chunk.activation_buffer(tokens)
            dist.recv(inputs, pp.ranks[pp.rank - 1])
        out = chunk(inputs)
        if not pp.is_last:
            dist.send(out.contiguous(), pp.ranks[pp.rank + 1])
            return None
        return gather_from(out, groups.tp)


Build = Callable[..., ModelChunks]
OF_GRADIENTS = 2 * RELATIVE


class Case(NamedTuple):
    """A random model of transformers: our config, its weights, and what it computes."""

    config: Any  # a GPTConfig of another model
    weights: Mapping[str, Any]
    batch: MicroBatch
    logits: Tensor
    gradients: Mapping[str, Tensor]


def case_of(
    model: nn.Module, fields: Mapping[str, Any], config: GPTConfig, batch: MicroBatch, outputs: Any
) -> Case:
    """Return the case of a model of transformers, whose `outputs` are those of the batch."""
    made = stacked_map(fields)
    state = dict(model.state_dict(keep_vars=True))
    theirs = {key: state[key] for key in made.right}
    outputs.loss.backward()
    weights = assembled(made, {key: param.detach() for key, param in theirs.items()})
    # A tied weight has one gradient, whatever its names are.
    gradients = assembled(made, {key: _gradient(param) for key, param in theirs.items()})
    arrays = {key: array.numpy().copy() for key, array in weights.items()}
    return Case(config, arrays, batch, outputs.logits.detach(), gradients)


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad


class Answer(NamedTuple):
    """What one rank computes of a case: numpy's arrays."""

    logits: Any
    boxes: list[tuple[Any, ...]]


def run(
    build: Build,
    cases: Sequence[Case],
    layout: ParallelLayout,
    sequence_parallel: bool = False,
    stages: str | None = None,
) -> list[Answer]:
    """Return this rank's logits and gradients."""
    answers = []
    groups = ParallelGroups.create(layout)
    for case in cases:
        table = None if stages is None else StageTable.from_string(stages, pp=layout.pp)
        model = build(case.config, groups, sequence_parallel=sequence_parallel, stages=table)
        entities = model.sharded_state_dict()
        fill(entities, {key: torch.from_numpy(array) for key, array in case.weights.items()})
        of_dp = MicroBatch(*(x.chunk(groups.dp.size)[groups.dp.rank] for x in case.batch))
        share = context_share_of(case.config, of_dp, groups.cp)
        out = _outputs(model, share.tokens, groups) if layout.vpp == 1 else None
        logits = None if out is None else out.transpose(0, 1)[..., : case.config.vocab_size].numpy()
        forward_backward(model, [share] * layout.pp, groups)
        boxes = gradient_boxes(model, entities, groups)
        answers.append(Answer(logits, [(*box[:3], box.data.numpy()) for box in boxes]))
    return answers


def context_share_of(config: GPTConfig, batch: MicroBatch, cp: Axis) -> MicroBatch:
    """Return what a rank of cp has of a micro-batch: shares of the tokens of a T5's encoder, and decoder."""
    ends = [config.encoder_length] if isinstance(config, T5Config) else []
    parts = [context_share(part, cp, dim=1) for part in batch.tokens.tensor_split(ends, dim=1)]
    return MicroBatch(torch.cat(parts, dim=1), context_share(batch.labels, cp, dim=1))


def real_tokens(count: int, tokens: int, seed: int) -> Tensor:
    """Return which tokens of some sequences are real, bool `[count, tokens]`; the others are padding.

    Padding is on the right if the seed is even, and on the left if it is odd. One sequence has 5 real tokens.
    """
    drawn = torch.randint(6, tokens, (count,), generator=torch.Generator().manual_seed(seed))
    drawn[0] = 5  # fewer than there are in a half, or on a rank of cp
    is_real = torch.arange(tokens) < drawn.unsqueeze(1)
    return is_real.flip(1) if seed % 2 else is_real


def check(
    cases: Sequence[Case],
    ranks: Sequence[Sequence[Answer]],
    layout: ParallelLayout,
    *,
    relative: float = OF_GRADIENTS,
) -> None:
    """Compare what the ranks of a layout computed with transformers; `relative` is for gradients."""
    for case, answers in zip(cases, zip(*ranks, strict=True), strict=True):
        compared = 0
        for rank, answer in enumerate(answers):
            if answer.logits is not None:
                groups = ParallelGroups.offline(layout, rank)
                expected = case.logits.chunk(layout.dp)[groups.dp.rank]
                own = context_share(expected, groups.cp, dim=1)
                assert_close(answer.logits, own, relative_error_of(case.config))
                compared += 1
        assert compared == (layout.world_size // layout.pp if layout.vpp == 1 else 0)
        boxes = [Box(*box[:3], torch.from_numpy(box[3])) for answer in answers for box in answer.boxes]
        gradients = join(boxes)
        for key, array in case.gradients.items():  # the vocabulary may be padded
            gradients[key], padding = gradients[key].tensor_split([len(array)])
            assert not padding.any()
        wanted = dict(case.gradients)
        for key in [key for key in wanted if key.endswith("linear_qkv.bias.k")]:
            # Softmax does not see what is added to all scores of a query: both are zero but for rounding.
            largest = wanted[key.removesuffix("k") + "v"].abs().max()
            for gradient in (gradients.pop(key), wanted.pop(key)):
                assert gradient.abs().max() <= RELATIVE * largest, key
        for key in [key for key in wanted if key.endswith("relative_positions.weight")]:
            assert_gradient_close(gradients.pop(key), wanted.pop(key), key, relative=sqrt(24) * OF_GRADIENTS)
        assert_all_close(gradients, wanted, relative=relative)
