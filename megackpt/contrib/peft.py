"""Adapter folders of Hugging Face's peft: written from a checkpoint of adapters, and read into one.

    export_peft("run/adapters", "folder", config="base_model")
    import_peft("folder", "adapters", config="base_model")

A folder has `adapter_config.json` and `adapter_model.safetensors`. Which layer of the Hugging Face model is
which of ours is taken from the map of its family. peft itself is not needed.

Source: peft 0.21 `utils/save_and_load.py` (names), `tuners/lora/config.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from megackpt.comm import SingleProcess
from megackpt.contrib.peft_names import (
    MAGNITUDE,
    A,
    B,
    PeftModule,
    modules_of,
    stacked_layers,
    stored_names,
    unstacked,
)
from megackpt.entities import ShardedTensor
from megackpt.errors import DeclarationError, FormatError, MapError
from megackpt.formats.documents import parse_document
from megackpt.maps import MapChoice
from megackpt.maps.family import chosen_map
from megackpt.maps.requests import OPTIMIZER
from megackpt.run.collective import load, save
from megackpt.run.local import load_content_metadata, load_tensors_metadata
from megackpt.storage import Location, opened_store
from megackpt.training.parallel.adapters import CHILD, check_adapter_name
from megackpt.training.parallel.lora import LoRAConfig
from megackpt.whole.adapter_arrays import stored_config
from megackpt.whole.copy_source import check_unchanged
from megackpt.whole.huggingface_map import with_stacked_layers_where_equal
from megackpt.whole.huggingface_model_files import ConfigSource, ModelFiles

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_ENDS = {A: ".weight", B: ".weight", MAGNITUDE: ""}
_NAMES = re.compile(
    re.escape(_PREFIX) + r"(?P<module>.+)\.(?P<what>lora_A|lora_B|lora_magnitude_vector)(\.weight)?"
)
_MAX_BYTES = 64 * 1024**3
# Choices of peft that change what an adapter computes, and that LoRAConfig does not have.
_UNSUPPORTED = (
    "alora_invocation_tokens", "alpha_pattern", "layer_replication", "lora_bias", "modules_to_save",
    "rank_pattern", "trainable_token_indices", "use_bdlora", "use_qalora",
    "velora_config", "monteclora_config",
)  # fmt: skip


def export_peft(
    source: Location,
    target: Location,
    *,
    adapter: str = "default",
    config: ConfigSource = None,
    map: MapChoice = "auto",
    base_model: str | None = None,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write an adapter of a checkpoint as a peft folder; return the names of the adapted modules. Local.

    The checkpoint has the adapter alone or with its base. Needs memory for the adapter.

    Args:
        source: the checkpoint, saved with `adapter_metadata(model)` as its content metadata.
        target: the folder; created if it does not exist.
        adapter: name of the adapter in the checkpoint.
        config: config.json of the base model, its path, or a folder that has it; None takes
            `huggingface_config` of the content metadata.
        map: the family of names; `"auto"` is that of the config.
        base_model: what the folder names as its base model, for peft's own loading.
        overwrite: replace an adapter at the target.

    Raises:
        DeclarationError: the checkpoint has no such adapter, or the target has one.
        MapError: the base model has no such layers, or has one matrix where ours has several.
        CheckpointError: the checkpoint cannot be read, or a file not be written.
    """
    content, where = load_content_metadata(source), str(source)
    lora = stored_config(content, adapter, where)
    base = ModelFiles.of(config, content, where=where).config
    modules = modules_of(chosen_map(map, base, (), where=where))
    arrays = _adapter_arrays(source, adapter)
    adapted = [module for module in modules.values() if module.is_adapted(arrays, adapter)]
    tensors = _tensors_of(adapted, arrays, adapter)
    document = _peft_config(lora, adapted, modules, base_model)
    with opened_store(target) as store:
        store.create()
        if not overwrite and (store.exists(CONFIG) or store.exists(WEIGHTS)):
            raise DeclarationError(f"{store.location} has an adapter. Give overwrite=True to replace it.")
        store.delete([name for name in (CONFIG, WEIGHTS) if store.exists(name)])
        store.replace(WEIGHTS, safetensors_bytes(tensors, metadata={"format": "pt"}))
        store.replace(CONFIG, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
        store.sync()
    return tuple(module.name for module in adapted)


def import_peft(
    source: Location,
    target: Location,
    *,
    adapter: str = "default",
    config: ConfigSource,
    map: MapChoice = "auto",
    stacked: bool = True,
) -> LoRAConfig:
    """Write a peft folder as a checkpoint of adapters only, which loads at any layout. Local.

    Give the returned config, which is also in the checkpoint, to `add_adapters`.

    Args:
        source: the folder.
        target: the new checkpoint.
        adapter: its name in the checkpoint.
        config: config.json of the base model, its path, or a folder that has it.
        map: the family of names; `"auto"` is that of the config.
        stacked: layers are stored along an axis if all layers of the model are equal, as models of equal
            layers have them.

    Raises:
        DeclarationError: the folder's adapter is not LoRA, or has choices that are not supported.
        MapError: it does not fit the base model: unknown modules, other shapes, another rank, or only some of
            the layers.
        FormatError: a file is damaged.
    """
    check_adapter_name(adapter)
    base = ModelFiles.of(config, None, where=str(source)).config
    document, by_module, where = _read_folder(source)
    _check_types(document, where)
    made = chosen_map(map, base, (), where=where)
    modules = modules_of(made)
    by_module = _with_names_of_parameters(by_module, modules, document)
    unknown = sorted(by_module.keys() - modules)
    if unknown:
        raise MapError(
            f"{where}: the base model has no module {unknown[0]!r} that can have an adapter. Give the config "
            f"of the adapter's base model.",
            key=unknown[0],
            path=where,
        )
    targets = {modules[name].target for name in by_module}
    lora = _our_config(document, targets, where)
    arrays: dict[str, Tensor] = {}
    for name, module in modules.items():
        if module.target in targets:
            module.check_shapes(by_module.get(name, {}), lora.rank, dora=lora.dora, where=where)
            arrays |= module.to_ours(by_module[name], adapter)
    if stacked and with_stacked_layers_where_equal(made) is not made:
        arrays = stacked_layers(arrays)
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in arrays.items()}
    content = {"adapters": {adapter: lora.to_json()}, "huggingface_config": dict(base)}
    save(state, target, content_metadata=content, group=SingleProcess())
    return lora


def _adapter_arrays(source: Location, adapter: str) -> dict[str, Tensor]:
    """Load the arrays of an adapter, with keys for each layer."""
    part = f".{CHILD}.{adapter}."
    wanted = {
        key: entity
        for key, entity in load_tensors_metadata(source).items()
        if part in key and not key.startswith(OPTIMIZER)
    }
    for entity in wanted.values():
        entity.init_data()
    loaded = load({"arrays": wanted}, source, group=SingleProcess())["arrays"]
    return unstacked(loaded)


def _tensors_of(
    adapted: Sequence[PeftModule], arrays: Mapping[str, Tensor], adapter: str
) -> dict[str, Tensor]:
    """Return the tensors of a folder by their names in it; every array is in one of them.

    Raises:
        MapError: an array has no place in a folder.
    """
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    stored = stored_names({module.name for module in adapted})
    for module in adapted:
        parts, keys = module.from_ours(arrays, adapter)
        used |= keys
        start = f"{_PREFIX}{stored[module.name]}"
        tensors |= {f"{start}.{what}{_ENDS[what]}": value for what, value in parts.items()}
    _check_all_used(arrays.keys() - used, adapter)
    return tensors


def _check_all_used(unused: set[str], adapter: str) -> None:
    if unused:
        key = min(unused)
        raise MapError(
            f"{key!r} of the adapter {adapter!r} has no place in a peft folder for this base model: experts "
            f"that a folder fuses have none, nor have layers that the model lacks. Merge the adapter into "
            f"the base, or give the config of its base model.",
            key=key,
        )


def _target_names(adapted: Sequence[PeftModule], modules: Mapping[str, PeftModule]) -> list[str]:
    """Return what peft finds the adapted modules by: the ends of their names, or else their whole names."""
    names = {module.name for module in adapted}
    ends = {name.rpartition(".")[2] for name in names}
    by_end = {name for name in modules if name.rpartition(".")[2] in ends}
    return sorted(ends if by_end == names else names)


def _peft_config(
    lora: LoRAConfig,
    adapted: Sequence[PeftModule],
    modules: Mapping[str, PeftModule],
    base_model: str | None,
) -> dict[str, Any]:
    parameters = {".".join(module.name.split(".")[-3:]) for module in adapted if module.experts}
    linear = [module for module in adapted if not module.experts]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.rank if lora.alpha is None else lora.alpha,
        "lora_dropout": lora.dropout,
        # An empty list: for null, peft adapts modules of its own choice.
        "target_modules": _target_names(linear, modules),
        "target_parameters": sorted(parameters) or None,
        "use_rslora": lora.rank_stabilised,
        "use_dora": lora.dora,
        "fan_in_fan_out": any(module.is_transposed for module in adapted),
        "bias": "none",
        "inference_mode": True,
    }


def _our_config(document: Mapping[str, Any], targets: set[str], where: str) -> LoRAConfig:
    """Return the config of a folder.

    Raises:
        DeclarationError: it is not that of LoRA, or has choices that are not supported.
    """
    unsupported = [name for name in _UNSUPPORTED if document.get(name)]
    unsupported += ["bias"] * (document.get("bias", "none") != "none")
    if document.get("peft_type") != "LORA" or unsupported:
        raise DeclarationError(
            f"{where}/{CONFIG}: peft_type {document.get('peft_type')!r} with {unsupported or 'no'} special "
            f"choices. LORA without {', '.join(_UNSUPPORTED)} and with bias none can be imported.",
            path=where,
        )
    return LoRAConfig(
        rank=document.get("r", 8),
        targets=tuple(sorted(targets)),
        alpha=document.get("lora_alpha", 8),
        dropout=document.get("lora_dropout", 0.0),
        rank_stabilised=document.get("use_rslora", False),
        dora=document.get("use_dora", False),
    )


_TYPES: Mapping[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "lora_dropout": (int, float),
    "use_rslora": (bool,),
    "use_dora": (bool,),
    "fan_in_fan_out": (bool,),
}


def _check_types(document: Mapping[str, Any], where: str) -> None:
    """Check the fields of a folder's config that decide what is read.

    Raises:
        FormatError: one has a value of another type.
    """
    faults = [n for n, types in _TYPES.items() if n in document and type(document[n]) not in types]
    parameters = document.get("target_parameters")
    is_list = isinstance(parameters, list) and all(isinstance(name, str) for name in parameters)
    faults += ["target_parameters"] * (parameters is not None and not is_list)
    if faults:
        raise FormatError(
            f"{where}/{CONFIG}: {faults[0]} is {document[faults[0]]!r:.200}, which peft does not write. The "
            f"file is damaged: fetch it again.",
            key=faults[0],
            path=where,
        )


def _with_names_of_parameters(
    tensors: Mapping[str, dict[str, Tensor]], modules: Mapping[str, PeftModule], document: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a folder by the names of modules and, for experts, of parameters."""
    targets = tuple(f".{target}" for target in document.get("target_parameters") or ())
    stored = stored_names([name for name, m in modules.items() if not m.experts or name.endswith(targets)])
    names = {own: name for name, own in stored.items()}
    return {names.get(own, own): parts for own, parts in tensors.items()}


def _read_folder(source: Location) -> tuple[Mapping[str, Any], dict[str, dict[str, Tensor]], str]:
    """Return the config of a folder, its tensors by module and kind, and its location.

    Raises:
        FormatError: a file is damaged, or has tensors of another kind.
    """
    with opened_store(source) as store:
        where = store.location
        changed = store.watch()
        document = parse_document(store.read(CONFIG, max_bytes=1 << 24), where=f"{where}/{CONFIG}")
        try:
            tensors = read_safetensors(store.read(WEIGHTS, max_bytes=_MAX_BYTES))
        except SafetensorError as error:
            raise FormatError(f"{where}/{WEIGHTS} is damaged: {error!s:.300}.", path=where) from error
        check_unchanged(changed, store)
    by_module: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAMES.fullmatch(key)
        if match is None:
            raise FormatError(
                f"{where}/{WEIGHTS}: {key!r:.200} is no tensor of LoRA. Only A, B and magnitudes of linear "
                f"modules can be imported.",
                path=where,
            )
        of_module = by_module.setdefault(match["module"], {})
        is_alone = match["what"] not in of_module  # not spelled with and without `.weight`
        if not is_alone or not tensor.is_floating_point():
            what = f"is {tensor.dtype}, and adapters are floating point" if is_alone else "is there twice"
            raise FormatError(
                f"{where}/{WEIGHTS}: {key!r:.200} {what}. The file is damaged: fetch it again.",
                key=key,
                path=where,
            )
        of_module[match["what"]] = tensor
    return document, by_module, where
