"""The configuration of a model as a checkpoint keeps it, and what differs from it in another one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from typing import Any

from models import GPTConfig


def plain_fields(model: GPTConfig) -> dict[str, Any]:
    """Return the fields of a model's configuration as JSON has them, with the dtype as text."""
    return _as_json(asdict(model) | {"params_dtype": str(model.params_dtype)})


def differences(model: GPTConfig, saved: Mapping[str, Any]) -> list[str]:
    """Return what differs between a model and the saved fields of another, in words. Dropout may differ.

    A field that was not saved is newer than the checkpoint: its model had the default.
    """
    complete = _as_json(_with_defaults(model, saved))
    return [
        f"{name} {complete.get(name)} instead of {value}"
        for name, value in plain_fields(model).items()
        if name != "dropout" and complete.get(name) != value
    ]


def _as_json(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with lists for tuples; checkpoints give back either, by their format."""
    plain: dict[str, Any] = json.loads(json.dumps(document))
    return plain


def _with_defaults(config: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved fields of a dataclass like `config`, and the defaults of those that it has in addition."""
    complete = dict(saved)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in complete:
            complete[field.name] = _default(field)
        elif is_dataclass(value) and isinstance(saved[field.name], Mapping):
            complete[field.name] = _with_defaults(value, saved[field.name])
    return complete


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return asdict(field.default_factory())
    return None if field.default is MISSING else field.default
