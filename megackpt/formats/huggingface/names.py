"""File names of a Hugging Face folder. Source: `transformers.utils` (`SAFE_WEIGHTS_NAME` and others)."""

from __future__ import annotations

import re
from collections.abc import Collection

from megackpt.formats.file_names import HUGGINGFACE, HUGGINGFACE_MODELS, is_of_a_save

BACKEND = "huggingface"
VERSION = 1

MODEL, INDEX = HUGGINGFACE_MODELS
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_SHARD = re.compile(r".*-of-\d+\.safetensors", re.DOTALL)
_OTHER_INDEX = re.compile(r"[^/]+\.safetensors\.index(?:\.[^/.]+)?\.json", re.DOTALL)
"""That of a variant (`model.safetensors.index.fp16.json`), or of a model of diffusers."""

_TRAINING_STATE = re.compile(
    r"(?:optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint|dl_state_dict)"
    r"(?:_\d+)?\.(?:pt|pth|bin|pkl)"
    r"|model_\d+\.safetensors"
)
"""Files next to the model in a folder of the Trainer, or of `Accelerator.save_state`."""


def find_model(names: Collection[str]) -> str | None:
    """Return the index of a folder, or its only safetensors file; None if there is neither.

    names are those of all files in the folder. As in transformers, `model.safetensors` comes first, then the
    index. An index of another name counts if it is the only one. A file of another name counts if it is the
    only safetensors file in the folder, and is not one of several shards, whose index may not have been
    written yet.
    """
    for name in (MODEL, INDEX):
        if name in names:
            return name
    indices = [name for name in names if _OTHER_INDEX.fullmatch(name)]
    if len(indices) == 1:
        return indices[0]
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(files) != 1 or not HUGGINGFACE.is_foreign(files[0]) or _SHARD.fullmatch(files[0]):
        return None
    # A file that an incomplete save of ours has left does not make a folder of Hugging Face.
    return None if any(map(is_of_a_save, names)) else files[0]


def training_state(names: Collection[str]) -> list[str]:
    """Return the files that the Trainer or accelerate has saved next to a model, sorted."""
    return sorted(name for name in names if _TRAINING_STATE.fullmatch(name))
