"""The text model inside of a multimodal one: its config, and the arrays of a folder that are its own.

Source: transformers 4.57 and 5.23, `conversion_mapping` and `models/*/configuration_*.py` of Gemma 3, Mistral
3 and Qwen2.5-VL: `text_config`, and names that begin with `language_model.`, `model.language_model.` or
`model.`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megackpt.errors import MapError

_SPELLINGS = (
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.language_model.": "model.", "lm_head.": "lm_head."},
    {name: name for name in ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")},
)
"""Spellings: what keys of the text model begin with in a folder, and in one of the text model alone.

A folder has the first spelling whose first entry one of its keys begins with.
"""


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model inside of a multimodal one.

    Attributes:
        config: its `config.json`, as if it stood alone.
        stored: the key of each of its arrays in the folder, by its key in a folder of the text model alone.
    """

    config: Mapping[str, Any]
    stored: Mapping[str, str]

    @classmethod
    def of(cls, config: Mapping[str, Any], keys: Collection[str]) -> TextPart:
        """Return the text model of a folder. Pure.

        Args:
            config: the parsed `config.json` of the whole model.
            keys: of the folder.

        Raises:
            MapError: the config has no `text_config`.
        """
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise MapError(
                "config.json has no text_config, so the folder has no text model inside of another one. "
                "Import all of it: leave text_only out.",
                key="text_config",
            )
        stored = _own_keys(keys)
        # transformers looks at these fields of the whole model, and ignores those of the text model.
        outer = {
            name: config[name] for name in ("tie_word_embeddings", "quantization_config") if name in config
        }
        text = {"tie_word_embeddings": "lm_head.weight" not in stored, **inner, **outer}
        if text["tie_word_embeddings"]:
            stored.pop("lm_head.weight", None)  # a copy of the embedding
        return cls(text, stored)


def _own_keys(keys: Collection[str]) -> dict[str, str]:
    """Return the keys of the text model, by those in a folder of the text model alone."""
    fitting = (s for s in _SPELLINGS if any(key.startswith(next(iter(s))) for key in keys))
    spelling = next(fitting, _SPELLINGS[0])
    return {
        own + key.removeprefix(begin): key
        for begin, own in spelling.items()
        for key in keys
        if key.startswith(begin)
    }
