"""Which module of a Hugging Face model is which layer of ours, and its matrices in both forms.

peft has one pair of matrices for each module: A `[rank, in]`, B `[out, rank]`, and with DoRA a magnitude
`[out]`. A module may be a layer of ours, a component of one (`q_proj` of `linear_qkv`), or all components of
one (`c_attn` of GPT-2).

Weights of experts are one parameter `[experts, out, in]`, and peft has one pair for all of them: A
`[experts * rank, in]`, with the expert first, and B `[out, rank * experts]`, with the expert last. The two
parameters of `experts` are adapted by two wrappers, one around the other. Pure.

Source: peft 0.21 `tuners/lora/layer.py`, `ParamWrapper.get_delta_weight`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megackpt.errors import MapError
from megackpt.maps import RegionMap
from megackpt.maps.regions import RegionPair
from megackpt.training.parallel.adapters import CHILD
from megackpt.training.parallel.lora import WHOLE

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"

_WEIGHT = re.compile(r"(?P<layer>.*\blayers\.\d+\.(?P<target>.+))\.weight(\.(?P<component>\w+))?")
_STACKED = re.compile(r"(?P<stack>(?:.*\.)?layers)\.(?P<name>\D.*)")
_EXPERT = re.compile(r"(?P<stem>.*\blayers\.\d+)\..*\bexperts\.\d+\..+\.weight")
_EXPERTS = ".mlp.experts."
_PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
_INNER = "base_layer"  # the wrapper of gate_up_proj, in that of down_proj
_OUR_NAMES = {A: "linear_in.weight", B: "linear_out.weight", MAGNITUDE: "magnitude"}


@dataclass(frozen=True, slots=True)
class PeftModule:
    """A linear module of a Hugging Face model, or a parameter of its experts.

    Attributes:
        name: its name there.
        layer: key of our layer, with its number.
        target: the end of the name of our layer or component.
        rows: for each component that it has, in the order of its rows, its name and number of rows; the name
            is "" for a layer without components.
        in_features: extent of its input.
        is_transposed: whether its weight is `[in, out]`, as that of GPT-2.
        experts: number of experts; 0 for a module.
    """

    name: str
    layer: str
    target: str
    rows: tuple[tuple[str, int], ...]
    in_features: int
    is_transposed: bool = False
    experts: int = 0

    @property
    def out_features(self) -> int:
        """Extent of its output."""
        return sum(size for _, size in self.rows)

    @property
    def own_rows(self) -> str:
        """Name of the rows in our adapter that belong to this module only."""
        return WHOLE if len(self.rows) > 1 else self.rows[0][0] or WHOLE

    def is_adapted(self, keys: Mapping[str, Tensor], adapter: str) -> bool:
        """Return whether an adapter with these keys has rows of this module."""
        names = {WHOLE, *(name for name, _ in self.rows)}
        return any(self._key(adapter, rows, A) in keys for rows in names)

    def from_ours(self, arrays: Mapping[str, Tensor], adapter: str) -> tuple[dict[str, Tensor], set[str]]:
        """Return peft's tensors of this module, and the keys of the arrays that they are made of.

        Raises:
            MapError: the module has one matrix A, and our adapter one for each component.
        """
        rows = self.own_rows if self._key(adapter, self.own_rows, A) in arrays else WHOLE
        key = self._key(adapter, rows, A)
        if key not in arrays:
            names = ", ".join(f"{self.target}.{name}" for name, _ in self.rows)
            raise MapError(
                f"{self.name!r} of the base model has one adapter for all its rows, and ours has several "
                f"({names}). Only an adapter with the target {self.target!r} can be exported to it.",
                key=key,
            )
        # A copy: safetensors does not write tensors that share memory, and q, k and v may share A.
        tensors, used = {A: arrays[key].flatten(0, -2).clone()}, {key}
        for what in (B, MAGNITUDE):
            keys = [self._key(adapter, rows, what, name) for name, _ in self.rows]
            if all(own in arrays for own in keys):
                tensors[what] = torch.cat([self._in_two_dims(arrays[own], what) for own in keys])
                used.update(keys)
        return tensors, used

    def to_ours(self, tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
        """Return our arrays for peft's tensors of this module, by key."""
        sizes = [size for _, size in self.rows]
        a = tensors[A]
        if self.experts:
            a = a.view(self.experts, -1, self.in_features)
        arrays = {self._key(adapter, self.own_rows, A): a}
        for what in (B, MAGNITUDE):
            if what in tensors:
                for (name, _), part in zip(
                    self.rows, torch.split_with_sizes(tensors[what], sizes), strict=True
                ):
                    if self.experts:
                        part = part.reshape(len(part), -1, self.experts).permute(2, 0, 1)
                    arrays[self._key(adapter, self.own_rows, what, name)] = part.contiguous()
        return arrays

    def _in_two_dims(self, array: Tensor, what: str) -> Tensor:
        return array.permute(1, 2, 0).flatten(1) if self.experts and what == B else array

    def check_shapes(self, tensors: Mapping[str, Tensor], rank: int, *, dora: bool, where: str) -> None:
        """Check that peft's tensors of this module fit it.

        Raises:
            MapError: one is missing, or has another shape.
        """
        ranks = rank * (self.experts or 1)
        expected: dict[str, tuple[int, ...]] = {A: (ranks, self.in_features), B: (self.out_features, ranks)}
        if dora:
            expected[MAGNITUDE] = (self.out_features,)
        actual = {what: tuple(tensor.shape) for what, tensor in tensors.items()}
        if actual != expected:
            raise MapError(
                f"{where}: the tensors of {self.name!r} have the shapes {actual or 'none'}; by the config of "
                f"the base model and rank {rank} they are {expected}. Give the config of the adapter's base "
                f"model, and compare r and use_dora in adapter_config.json. All layers must have an adapter.",
                key=self.name,
                path=where,
            )

    def _key(self, adapter: str, rows: str, what: str, component: str = "") -> str:
        end = f".{component}" if component else ""
        return f"{self.layer}.{CHILD}.{adapter}.{rows}.{_OUR_NAMES[what]}{end}"


def modules_of(made: RegionMap) -> dict[str, PeftModule]:
    """Return the modules of a family that can have an adapter, by name."""
    pairs: dict[str, list[RegionPair]] = defaultdict(list)
    for pair in made.pairs:
        if pair.right.key.endswith(".weight") and len(made.right[pair.right.key].viewed) == 2:
            pairs[pair.right.key.removesuffix(".weight")].append(pair)
    modules = {}
    for name, own in pairs.items():
        module = _module(name, own, made.right[f"{name}.weight"].viewed)
        if module is not None:
            modules[name] = module
    return modules | _experts_of(made)


def stored_names(adapted: Collection[str]) -> dict[str, str]:
    """Return the name that each adapted module or parameter has in the tensors of a folder."""
    names = {}
    for name in adapted:
        owner, _, parameter = name.rpartition(".")
        if parameter not in _PARAMETERS.values() or not owner.endswith(".experts"):
            names[name] = name
        elif parameter == _PARAMETERS["linear_fc1"] and f"{owner}.{_PARAMETERS['linear_fc2']}" in adapted:
            names[name] = f"{owner}.{_INNER}"
        else:
            names[name] = owner
    return names


def unstacked(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays with keys for each layer, of some whose layers may be stacked along their first axis."""
    layers: dict[str, Tensor] = {}
    for key, array in arrays.items():
        match = _STACKED.fullmatch(key)
        if match is None:
            layers[key] = array
        else:
            layers |= {f"{match['stack']}.{n}.{match['name']}": part for n, part in enumerate(array)}
    return layers


def stacked_layers(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return arrays stacked along an axis over layers; each has keys for all layers.

    Raises:
        MapError: layers have different dtypes, which a stack would convert.
    """
    layers: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for key, array in arrays.items():
        stack, _, name = key.partition("layers.")
        number, _, name = name.partition(".")
        layers[f"{stack}layers.{name}"].append((int(number), array))
    for key, parts in layers.items():
        dtypes = sorted({str(array.dtype) for _, array in parts})
        if len(dtypes) > 1:
            raise MapError(
                f"{key!r} has other dtypes in other layers: {', '.join(dtypes)}. Import it with "
                f"stacked=False, or convert the folder to one dtype.",
                key=key,
            )
    return {
        key: torch.stack([array for _, array in sorted(parts, key=lambda part: part[0])])
        for key, parts in layers.items()
    }


def _experts_of(made: RegionMap) -> dict[str, PeftModule]:
    """Return the parameters of experts, of families whose folders have an array for each expert."""
    parameters: dict[str, PeftModule] = {}
    for pair in made.pairs:
        ours, theirs = _WEIGHT.fullmatch(pair.left.key), _EXPERT.fullmatch(pair.right.key)
        if ours is None or theirs is None or _EXPERTS not in pair.left.key:
            continue
        experts, rows, width = made.left[pair.left.key].viewed
        name = f"{theirs['stem']}{_EXPERTS}{_PARAMETERS[ours['target'].rpartition('.')[2]]}"
        module = PeftModule(name, ours["layer"], ours["target"], (), width, experts=experts)
        known = dict(parameters.get(name, module).rows)
        known[ours["component"] or ""] = rows  # gate before up
        parameters[name] = replace(module, rows=tuple(sorted(known.items())))
    return parameters


def _module(name: str, pairs: Sequence[RegionPair], shape: tuple[int, ...]) -> PeftModule | None:
    """Return a module with a matrix of these pairs; None if it cannot have an adapter."""
    matches = [_WEIGHT.fullmatch(pair.left.key) for pair in pairs]
    axes = {pair.axes for pair in pairs}
    if None in matches or axes not in ({(0, 1)}, {(1, 0)}):
        return None  # not in a layer, or an expert
    (order,) = axes
    out = order.index(0)  # the dim of their outputs
    layers = {match["layer"] for match in matches if match}
    targets = {match["target"] for match in matches if match}
    is_whole = all(pair.right.box.shape[1 - out] == shape[1 - out] for pair in pairs)
    if len(layers) > 1 or not is_whole or targets == {"mlp.router"}:
        return None
    in_order = sorted(zip(pairs, matches, strict=True), key=lambda both: both[0].right.box.start[out])
    rows = tuple((m["component"] or "", p.right.box.shape[out]) for p, m in in_order if m)
    if len({component for component, _ in rows}) < len(rows):
        return None  # rows of components by turns
    (target,) = targets
    if len(rows) == 1 and rows[0][0]:
        target = f"{target}.{rows[0][0]}"
    return PeftModule(name, layers.pop(), target, rows, shape[1 - out], out == 1)
