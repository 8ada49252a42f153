"""The files of a Hugging Face folder that hold no weights: config.json, generation_config.json, tokenizer.

They come from a folder that is given, or from the content metadata of a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from megackpt.errors import DeclarationError, FormatError
from megackpt.formats.documents import parse_document
from megackpt.formats.huggingface.names import CONFIG, GENERATION_CONFIG
from megackpt.storage import Location, Store, opened_store
from megackpt.storage.store import is_allowed_name

ConfigSource: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | None
"""A parsed config.json, the path of one, a folder (path or URL) that has one, or None."""

KEPT_FILES = "huggingface_files"
"""Key of the content metadata of an imported checkpoint: files of the tokenizer, a dict of bytes by name."""

MAX_KEPT_BYTES = 64 * 1024 * 1024
"""The most bytes of all files under that key: each rank reads them when it opens the checkpoint."""

_ENDS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_MAX_BYTES = 256 * 1024 * 1024  # tokenizers with large vocabularies have some 30 MB
_MAX_DEPTH = 100
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """All files of the folder except the weights.

    Attributes:
        config: the parsed config.json.
        others: the content of the other files, by name.
    """

    config: Mapping[str, Any]
    others: Mapping[str, bytes]

    @classmethod
    def of(cls, source: ConfigSource, content_metadata: Any, *, where: str) -> ModelFiles:
        """Read them. Local.

        Args:
            source: the argument `config` of an export.
            content_metadata: of the checkpoint, used if there is no source.
            where: the checkpoint, for the error.

        Raises:
            DeclarationError: there is no config.
            FormatError, StorageError: a file cannot be read.
        """
        if source is None:
            return _of_metadata(content_metadata, where)
        if isinstance(source, Mapping):
            _check_json(source, "config", where)
            return cls(source, {})
        if isinstance(source, (str, os.PathLike)):
            return _of_path(os.fspath(source))
        raise DeclarationError(
            f"config is a {type(source).__name__}. Give the parsed config.json, its path, or a folder."
        )

    def files(self, dtype: str) -> dict[str, bytes]:
        """Return the content of all files by name, where weights are written in this dtype."""
        config = with_both_spellings(self.config)
        names = [name for name in _DTYPE_KEYS if name in config] or [_DTYPE_KEYS[0]]
        # transformers loads weights in the dtype that the config names, whatever the files hold.
        config.update(dict.fromkeys(names, dtype))
        return {**self.others, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}


def _of_metadata(content: Any, where: str) -> ModelFiles:
    config = content.get("huggingface_config") if isinstance(content, Mapping) else None
    if not isinstance(config, Mapping):
        raise DeclarationError(
            f"{where}: the content metadata has no huggingface_config, and a Hugging Face folder needs a "
            f"config.json. Give config= (or --config), the config or a folder that has it.",
            path=where,
        )
    _check_json(config, "huggingface_config of the content metadata", where)
    generation, kept = content.get("huggingface_generation_config"), content.get(KEPT_FILES)
    others = _with_safe_names(kept) if isinstance(kept, Mapping) else {}
    if isinstance(generation, Mapping) and GENERATION_CONFIG not in others:
        _check_json(generation, "huggingface_generation_config of the content metadata", where)
        others[GENERATION_CONFIG] = (json.dumps(generation, indent=2, sort_keys=True) + "\n").encode()
    return ModelFiles(config, others)


def _check_json(value: Any, path: str, where: str, depth: int = 0) -> None:
    """Check that a file of JSON can hold a value; path is its place.

    Raises:
        DeclarationError: it cannot.
    """
    if depth > _MAX_DEPTH:
        raise DeclarationError(
            f"{where}: {path:.200} is nested more than {_MAX_DEPTH} levels deep.", key=path
        )
    if isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                raise DeclarationError(
                    f"{where}: {path:.200} has the key {key!r:.80}, and keys of JSON are text. Give what "
                    f"config.to_dict() of transformers has, read from its JSON.",
                    key=path,
                )
            _check_json(member, f"{path}.{key}", where, depth + 1)
    elif isinstance(value, list | tuple):
        for number, member in enumerate(value):
            _check_json(member, f"{path}.{number}", where, depth + 1)
    elif not isinstance(value, str | int | float | None):
        raise DeclarationError(
            f"{where}: {path:.200} is a {type(value).__name__}, which JSON does not have. Give numbers, "
            f"text, lists and dicts: json.loads(config.to_json_string()) of transformers.",
            key=path,
        )


def with_both_spellings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in which both generations of transformers find the rotary positions. Pure.

    transformers 5 has all of them in `rope_parameters`. transformers 4 looks at `rope_theta` and
    `rope_scaling`, and where these are missing it computes with the default of the family.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return dict(config)
    older: dict[str, Any] = {}
    windowed = rope.get("sliding_attention")
    if isinstance(windowed, Mapping) and "rope_theta" in windowed:
        # Gemma 3, with one mapping for each type of layer.
        older["rope_local_base_freq"] = windowed["rope_theta"]
        rope = rope.get("full_attention")
    if not isinstance(rope, Mapping) or not isinstance(rope.get("rope_theta"), int | float):
        return dict(config)
    older |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    scaling = {name: value for name, value in rope.items() if name not in older}
    is_scaled = scaling.get("rope_type", scaling.get("type", "default")) != "default"
    older["rope_scaling"] = scaling if is_scaled else None
    return {**older, **config}


def _of_path(path: str) -> ModelFiles:
    """Read config.json alone, or with its neighbours if path is a folder."""
    is_file = path.endswith(".json")
    folder: Location = (os.path.dirname(path) or ".") if is_file else path
    name = os.path.basename(path) if is_file else CONFIG
    with opened_store(folder) as store:
        data, where = store.read(name, max_bytes=_MAX_BYTES), f"{store.location}/{name}"
        try:
            config = parse_document(data, where=where)
        except FormatError as error:
            raise DeclarationError(
                f"{where} is no JSON object, and a config is one. Give config= (or --config) the config.json "
                f"of a model, or a folder that has it."
            ) from error
        return ModelFiles(config, {} if is_file else _others_in(store))


def _others_in(store: Store) -> dict[str, bytes]:
    return {name: store.read(name, max_bytes=_MAX_BYTES) for name in store.names() if _is_other(name)}


def _is_other(name: str) -> bool:
    """Return whether a name is that of a small file at the top of a folder, other than config and index."""
    lower = name.lower()  # some file systems do not tell "Config.json" from "config.json"
    return (
        lower.endswith(_ENDS)
        and "/" not in name
        and is_allowed_name(name)
        and not name.startswith(".")
        and lower != CONFIG
        and not lower.endswith(".index.json")
    )


def _with_safe_names(kept: Mapping[Any, Any]) -> dict[str, bytes]:
    """Return the files that an import could have kept: a checkpoint may come from anybody."""
    return {
        name: data
        for name, data in kept.items()
        if isinstance(name, str) and isinstance(data, bytes) and _is_other(name)
    }


def kept_files(store: Store, replacements: Mapping[str, bytes]) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that an import keeps, smallest first, up to MAX_KEPT_BYTES; and names of the others.

    The generation config of the folder is not among them: content metadata has it under a key of its own.

    Args:
        store: the folder.
        replacements: files from elsewhere, which replace those of the folder.
    """
    sizes = {name: store.size(name) for name in store.names() if _is_other(name)}
    sizes.pop(GENERATION_CONFIG, None)
    sizes |= {name: len(data) for name, data in replacements.items()}
    kept: dict[str, bytes] = {}
    left_out, room = [], MAX_KEPT_BYTES
    for nbytes, name in sorted((nbytes, name) for name, nbytes in sizes.items()):
        if nbytes > room:
            left_out.append(name)
        else:
            kept[name] = replacements[name] if name in replacements else store.read(name, max_bytes=nbytes)
            room -= nbytes
    return kept, left_out
