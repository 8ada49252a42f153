"""File names of a Hugging Face folder. Source: `transformers.utils` (`SAFE_WEIGHTS_NAME` and others)."""

from __future__ import annotations

import re
from collections.abc import Collection

from megackpt.formats.file_names import HUGGINGFACE, HUGGINGFACE_MODELS, NATIVE, TORCH_DIST, ZARR_V1, ZARR_V3

BACKEND = "huggingface"
VERSION = 1

MODEL, INDEX = HUGGINGFACE_MODELS
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_SHARD = re.compile(r".*-of-\d+\.safetensors", re.DOTALL)


def find_model(names: Collection[str]) -> str | None:
    """Return the index of a folder, or its only safetensors file; None if there is neither.

    names are those of all files in the folder. As in transformers, `model.safetensors` comes first, then the
    index. A file of another name counts if it is the only safetensors file in the folder, and is not one of
    several shards, whose index may not have been written yet.
    """
    for name in (MODEL, INDEX):
        if name in names:
            return name
    files = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(files) != 1 or not HUGGINGFACE.is_foreign(files[0]) or _SHARD.fullmatch(files[0]):
        return None
    # A file that an incomplete save of ours has left does not make a folder of Hugging Face.
    ours = (NATIVE, TORCH_DIST, ZARR_V1, ZARR_V3)
    if any(file_names.attempt_of(name) for name in names for file_names in ours):
        return None
    return files[0]
