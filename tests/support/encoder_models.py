"""Models with an encoder at any layout: logits and gradients of one step, to be compared with transformers'.

Tolerance: everything is float32 and only the order of sums differs. A logit goes through some 10 layers of 4
products with sums of at most 50 rounded terms, and an element of a gradient is a sum over 2 * 24 tokens of
such terms: random errors add up to sqrt(10 * 4 * 50 * 48) * 2^-24 = 2e-5 at worst, which is the tolerance of
gradients. Logits are sums of fewer terms, and have `RELATIVE`. Processors differ in the order of sums: errors
of gradients stay below 1e-5 on one kind, and reach 1.2e-5 on another. A missing sum is off by a factor of 2.

An element of the gradient of relative positions is a sum over pairs of tokens, 24 times as many terms. Over
the keys of a query they add up to zero, so the sum is small against its terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from models import GPTConfig, T5Config
from tests.support.gpt import Box, assert_all_close, gradient_boxes, join
from tests.support.gpt import assert_close as assert_gradient_close
from tests.support.huggingface_folders import stacked_map
from tests.support.huggingface_models import RELATIVE, assert_close, fill
from tests.support.states import assembled

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


def randomise(model: nn.Module, seed: int) -> None:
    """Give a model of transformers random weights, biases and norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            # Matrices keep the size of what they multiply; norms are 1 and some.
            param.copy_(param + 0.3 * noise if param.ndim == 1 else noise / param.shape[-1] ** 0.5)


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
        logits = _logits(model, share.tokens, groups, case.config.vocab_size) if layout.vpp == 1 else None
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


def _logits(model: ModelChunks, tokens: Tensor, groups: ParallelGroups, vocab_size: int) -> Any:
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
    return gather_from(out, groups.tp).transpose(0, 1)[..., :vocab_size].numpy()


def check(cases: Sequence[Case], ranks: Sequence[Sequence[Answer]], layout: ParallelLayout) -> None:
    """Compare what the ranks of a layout computed with transformers."""
    for case, answers in zip(cases, zip(*ranks, strict=True), strict=True):
        compared = 0
        for rank, answer in enumerate(answers):
            if answer.logits is not None:
                groups = ParallelGroups.offline(layout, rank)
                expected = case.logits.chunk(layout.dp)[groups.dp.rank]
                assert_close(answer.logits, context_share(expected, groups.cp, dim=1))
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
        assert_all_close(gradients, wanted, relative=OF_GRADIENTS)
