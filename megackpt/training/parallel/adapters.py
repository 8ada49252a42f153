"""Adapters in a model: add, initialise, declare, activate and merge them.

    add_adapters(model, LoRAConfig(rank=8, targets=("linear_qkv.q", "linear_qkv.v")), groups, seed=1)
    params = [{"params": adapter_parameters(model)}]    # none, maybe, on a stage of the pipeline
    optimizer = DistributedOptimizer(params, torch.optim.AdamW, groups)
    declared = model.sharded_state_dict()
    megackpt.load(base_state(declared), "base")          # every element of the base is checked
    megackpt.save(adapter_state(declared), "adapters", content_metadata=adapter_metadata(model))

The layers are in `lora`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from megackpt.entities import ShardedLayout, ShardedStateDict, ShardedTensor
from megackpt.errors import DeclarationError
from megackpt.training.parallel.collectives import all_reduce
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.lora import AdaptedLayer, LoRA, LoRAConfig, components_of
from megackpt.training.parallel.mixin import sharded_state_dict
from megackpt.training.parallel.rng import ParallelRng, stable_seed

CHILD = "adapter"
"""Name of the child of a layer that has its adapters by name, and part of their keys."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def add_adapters(
    model: nn.Module,
    config: LoRAConfig,
    groups: ParallelGroups,
    *,
    name: str = "default",
    seed: int = 0,
    rng: ParallelRng | None = None,
) -> None:
    """Give the targets of a config an adapter, and freeze everything that is no adapter.

    The matrices B are 0, so that the model computes what it did. The values of A depend on seed, key and
    global shape only, and not on the layout. After the base is loaded, call `reset_magnitudes` for DoRA.
    Collective over pp, if these groups communicate.

    Args:
        model: all chunks of this rank.
        config: targets and choices.
        groups: the ranks around this one.
        name: of the adapter; a model may have several, which are added to each other.
        seed: for the initial values.
        rng: random streams for dropout.

    Raises:
        DeclarationError: no layer has the name of a target, or it cannot have an adapter; two targets name
            the same rows; the model has an adapter of this name; tp does not divide the rank.
    """
    check_adapter_name(name)
    configs = _configs(model)
    if name in configs:
        raise DeclarationError(f"the model has an adapter {name!r} already. Choose another name.")
    targets = _find_targets(model, config, groups)
    made = [(layer, LoRA(layer, config, parts, groups, rng)) for layer, parts in targets]
    model.requires_grad_(False)
    model.adapter_configs = {**configs, name: config}  # type: ignore[assignment]
    for layer, adapter in made:
        if CHILD not in layer._modules:
            layer.add_module(CHILD, nn.ModuleDict())
            layer.register_forward_hook(_run_adapters)
        cast(nn.ModuleDict, layer.adapter)[name] = adapter
    for param in adapter_parameters(model):
        param.requires_grad_()
    _initialise(adapter_state(sharded_state_dict(model, groups), name), seed)


def check_adapter_name(name: object) -> None:
    """Check that a name can be a part of keys. Pure.

    Raises:
        DeclarationError: it cannot.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DeclarationError(f"{name!r:.200} cannot name an adapter. Use letters, digits, _ and -.")


def adapter_parameters(model: nn.Module, name: str | None = None) -> list[nn.Parameter]:
    """Return the parameters of one adapter, or of all, in the order of the model. Local."""
    return [
        param
        for _, adapters in _adapted_layers(model)
        for own, adapter in adapters.items()
        if name in (None, own)
        for param in adapter.parameters()
    ]


def set_active_adapters(model: nn.Module, names: Iterable[str]) -> None:
    """Let only these adapters change what the model computes. Local.

    Raises:
        DeclarationError: the model has no adapter of a name.
    """
    active = set(names)
    for name in sorted(active):
        _check_has(model, name)
    for _, adapters in _adapted_layers(model):
        for name, adapter in adapters.items():
            cast(LoRA, adapter).is_active = name in active


def merge_adapter(model: nn.Module, name: str = "default") -> None:
    """Add an adapter to the weights of its layers, and remove it. Collective over tp.

    Sums are computed in float32 and rounded to the dtype of the weight.

    Raises:
        DeclarationError: the model has no adapter of this name.
    """
    _check_has(model, name)
    for layer, adapters in _adapted_layers(model):
        if name in adapters:
            cast(LoRA, adapters[name]).merge_into(layer)
            del adapters[name]
    del _configs(model)[name]


def reset_magnitudes(model: nn.Module, name: str = "default") -> None:
    """Set the magnitudes of DoRA to the lengths of the rows of the weights. Collective over tp.

    Call it when the base is loaded; adapters without magnitudes stay as they are.

    Raises:
        DeclarationError: the model has no adapter of this name.
    """
    _check_has(model, name)
    for layer, adapters in _adapted_layers(model):
        if name in adapters:
            cast(LoRA, adapters[name]).reset_magnitudes(layer)


def adapter_metadata(model: nn.Module) -> dict[str, Any]:
    """Return `{"adapters": {name: config}}` as JSON values, for the content metadata of a save. Local.

    `LoRAConfig.from_json(load_content_metadata(path)["adapters"]["default"])` returns a config again.
    """
    return {"adapters": {name: config.to_json() for name, config in _configs(model).items()}}


def adapter_state(state: ShardedStateDict, name: str | None = None) -> ShardedStateDict:
    """Return what a model's sharded state dict declares of one adapter, or of all. Local, pure."""
    part = f".{CHILD}." if name is None else f".{CHILD}.{name}."
    return {path: entity for path, entity in state.items() if part in f".{path}"}


def base_state(state: ShardedStateDict) -> ShardedStateDict:
    """Return what a model's sharded state dict declares without adapters. Local, pure."""
    return {path: entity for path, entity in state.items() if f".{CHILD}." not in f".{path}"}


def _run_adapters(layer: AdaptedLayer, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    for adapter in cast(nn.ModuleDict, layer.adapter).values():
        if cast(LoRA, adapter).is_active:
            output = adapter(layer, output, *inputs)
    return output


def _adapted_layers(model: nn.Module) -> list[tuple[AdaptedLayer, nn.ModuleDict]]:
    """Return the layers with adapters, and their adapters by name."""
    return [
        (cast(AdaptedLayer, module), cast(nn.ModuleDict, module._modules[CHILD]))
        for module in model.modules()
        if isinstance(module, get_args(AdaptedLayer)) and CHILD in module._modules
    ]


def _configs(model: nn.Module) -> dict[str, LoRAConfig]:
    """Return the configs of the model's adapters by name, also of those without a layer on this stage."""
    return cast(dict[str, LoRAConfig], getattr(model, "adapter_configs", {}))


def _check_has(model: nn.Module, name: str) -> None:
    names = sorted(_configs(model))
    if name not in names:
        raise DeclarationError(f"the model has no adapter {name!r}; it has {', '.join(names) or 'none'}.")


def _find_targets(
    model: nn.Module, config: LoRAConfig, groups: ParallelGroups
) -> list[tuple[AdaptedLayer, tuple[str, ...]]]:
    """Return the layers of the targets, and components that are targets themselves. Collective over pp."""
    targets = []
    matched: set[str] = set()
    names: set[str] = set()
    for path, layer in model.named_modules():
        if not isinstance(layer, get_args(AdaptedLayer)) or f".{CHILD}." in f".{path}.":
            continue
        names.add(path)
        by_part = {part: _matching(f"{path}.{part}", config) for part in components_of(layer)}
        of_layer = _matching(path, config)
        hits = [target for part in by_part.values() for target in part] + of_layer
        if max(map(len, by_part.values()), default=0) + len(of_layer) > 1 or (of_layer and len(hits) > 1):
            raise DeclarationError(
                f"the targets {', '.join(map(repr, hits))} name the same rows of {path!r}. Name the layer or "
                f"its components, each once.",
                path=path,
            )
        if hits:
            targets.append((layer, tuple(part for part, own in by_part.items() if own)))
            matched.update(hits)
    _check_all_matched(config, matched, names, groups, next(model.parameters()).device)
    return targets


def _matching(path: str, config: LoRAConfig) -> list[str]:
    return [target for target in config.targets if f".{path}".endswith(f".{target}")]


def _check_all_matched(
    config: LoRAConfig, matched: set[str], names: set[str], groups: ParallelGroups, device: torch.device
) -> None:
    """Check that each target is on a stage of the pipeline. Collective over pp.

    Raises:
        DeclarationError: one is on none.
    """
    counts = torch.tensor([int(target in matched) for target in config.targets], device=device)
    if groups.pp.group is not None:
        counts = all_reduce(counts, groups.pp)
    elif groups.pp.size > 1:
        return  # the other stages cannot be asked
    unknown = [target for target, count in zip(config.targets, counts.tolist(), strict=True) if not count]
    if unknown:
        ends = sorted({name.rpartition(".")[2] for name in names})
        raise DeclarationError(
            f"no layer that can have an adapter has a name that ends with {', '.join(map(repr, unknown))}. "
            f"Here are {', '.join(ends) or 'none'} and their components, as in linear_qkv.q. Correct the "
            f"targets.",
            rank=groups.rank,
        )


def _initialise(state: ShardedStateDict, seed: int) -> None:
    """Set A of an adapter to values of Kaiming's uniform distribution, and B to 0. Local.

    Source: peft `LoraLayer.reset_lora_parameters`: bound `1 / sqrt(in)`.
    """
    with torch.no_grad():
        for tensor in _tensors(state):
            if ".linear_in." in tensor.key:
                _draw(tensor, seed)
            elif ".linear_out." in tensor.key:
                cast(Tensor, tensor.data).zero_()


def _draw(tensor: ShardedTensor, seed: int) -> None:
    """Fill this rank's part of the matrices of all layers and experts, each with numbers of its own."""
    assert tensor.data is not None
    *_, rank, width = tensor.global_shape
    rows, columns = tensor.global_slice()[-2:]
    matrices = tensor.data.view(-1, *tensor.data.shape[-2:])
    extents = (*(1,) * tensor.prepend_axis_num, *tensor.data.shape[:-2])  # of the axes over layers, experts
    leading = [range(start, start + n) for start, n in zip(tensor.global_offset, extents, strict=False)]
    for matrix, index in zip(matrices, itertools.product(*leading), strict=True):
        generator = torch.Generator().manual_seed(stable_seed(seed, tensor.key, *index))
        whole = (2 * torch.rand(rank, width, generator=generator) - 1) / math.sqrt(width)
        matrix.copy_(whole[rows, columns])


def _tensors(state: ShardedStateDict) -> Iterator[ShardedTensor]:
    for entity in state.values():
        if isinstance(entity, ShardedLayout):
            yield from entity.tensors()
        elif isinstance(entity, ShardedTensor):
            yield entity
