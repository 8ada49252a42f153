"""Models of ours at any layout, compared with logits and gradients of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megackpt.parallel import MicroBatch, ParallelGroups, ParallelLayout, context_share, forward_backward
from models import GPTConfig, build_gpt
from tests.support.gpt import Box, assert_all_close, gradient_boxes, join
from tests.support.huggingface_experts import fill
from tests.support.huggingface_models import assert_close, logits_of, relative_error_of, token_ids

Results: TypeAlias = list[tuple[Any, list[tuple[Any, ...]]]]
"""Of one rank, for each model: logits, or None, and boxes of gradients. Arrays are numpy's."""


class Case(NamedTuple):
    """A random model of transformers: our config, its weights, and what it computes."""

    config: GPTConfig
    weights: Mapping[str, Any]  # numpy's, which need no shared memory
    logits: Tensor
    gradients: Mapping[str, Tensor]


def batch(config: GPTConfig) -> MicroBatch:
    tokens = token_ids(config.vocab_size)
    return MicroBatch(tokens, tokens.flip(1).roll(3, 1))


def run(
    models: list[tuple[GPTConfig, Any]], layout: ParallelLayout, sequence_parallel: bool = False
) -> Results:
    """Return this rank's logits and gradients of each model."""
    results = []
    for config, weights in models:
        groups = ParallelGroups.create(layout)
        model = build_gpt(config, groups, sequence_parallel=sequence_parallel)
        entities = model.sharded_state_dict()
        fill(entities, {key: torch.from_numpy(array) for key, array in weights.items()})
        logits = logits_of(model, config, groups)
        whole = batch(config)
        own = (x.chunk(groups.dp.size)[groups.dp.rank] for x in whole)
        share = MicroBatch(*(context_share(x, groups.cp, dim=1) for x in own))
        forward_backward(model, [share], groups)
        boxes = gradient_boxes(model, entities, groups)
        results.append((logits, [(*box[:3], box.data.numpy()) for box in boxes]))
    return results


def check(ranks: list[Results], layout: ParallelLayout, cases: Iterable[Case], *, relative: float) -> None:
    """Compare the results of all ranks with those of transformers; `relative` is for gradients."""
    for expected, results in zip(cases, zip(*ranks, strict=True), strict=True):
        compared = 0
        for rank, (logits, _) in enumerate(results):
            if logits is not None:
                dp = layout.coordinates(rank).dp
                assert_close(logits, expected.logits.chunk(layout.dp)[dp], relative_error_of(expected.config))
                compared += 1
        assert compared == layout.world_size // layout.pp
        boxes = [Box(*box[:3], torch.from_numpy(box[3])) for _, own in results for box in own]
        gradients = join(boxes)
        for key in gradients.keys() & {"embedding.word_embeddings.weight", "output_layer.weight"}:
            gradients[key], padding = gradients[key].split_with_sizes(
                [expected.config.vocab_size, len(gradients[key]) - expected.config.vocab_size]
            )
            assert not padding.any()
        assert_all_close(gradients, expected.gradients, relative=relative)
