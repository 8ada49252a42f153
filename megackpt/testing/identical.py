"""Whether two values are the same in class and bits, which `==` does not tell.

The strict comparison that round-trip tests need: NaN payloads, -0.0 against 0.0, 1 against True,
dtypes, the order of dicts.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import struct
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def difference(first: object, second: object, *, path: str = "value") -> str | None:
    """Return where and how two values differ, or None if they are the same in class and bits.

    Knows the values that `megackpt.codec` saves. Tensors are compared by dtype, shape and bytes, not by
    device, strides or requires_grad.

    >>> difference({"a": [1, 0.0]}, {"a": [1, -0.0]})
    "value['a'][1]: 0.0 is not -0.0"
    """
    if type(first) is not type(second):
        return f"{path}: {type(first).__name__} {first!r:.80} is not {type(second).__name__} {second!r:.80}"
    parts_1, parts_2 = _parts(first), _parts(second)
    if parts_1 is None or parts_2 is None:
        return None if _bits(first) == _bits(second) else f"{path}: {first!r:.80} is not {second!r:.80}"
    options_1, keys_1, values_1 = parts_1
    options_2, keys_2, values_2 = parts_2
    if options_1 != options_2:
        return f"{path}: {options_1!r:.80} is not {options_2!r:.80}"
    if len(values_1) != len(values_2):
        return f"{path}: {len(values_1)} parts are not {len(values_2)}"
    for position, (key_1, key_2) in enumerate(zip(keys_1, keys_2, strict=True)):
        reason = difference(key_1, key_2, path=f"{path}.key[{position}]")
        if reason:
            return reason
    for key, value_1, value_2 in zip(keys_1, values_1, values_2, strict=True):
        reason = difference(value_1, value_2, path=f"{path}[{key!r}]")
        if reason:
            return reason
    return None


def _parts(value: Any) -> tuple[object, list[Any], list[Any]] | None:
    """Return a container's options, the keys of its parts, and the parts; None for other values."""
    options: object = None
    if isinstance(value, dict):
        options = value.default_factory if isinstance(value, defaultdict) else None
        return options, list(value), list(value.values())
    if isinstance(value, (list, tuple, deque)):
        options = value.maxlen if isinstance(value, deque) else None
        return options, list(range(len(value))), list(value)
    if isinstance(value, (set, frozenset)):
        return None, list(range(len(value))), sorted(value, key=_sort_key)
    if isinstance(value, (argparse.Namespace, SimpleNamespace)):
        return None, list(vars(value)), list(vars(value).values())
    if dataclasses.is_dataclass(value) and not isinstance(value, enum.Enum):
        names = [field.name for field in dataclasses.fields(value)]
        return None, names, [getattr(value, name) for name in names]
    if isinstance(value, slice):
        return None, ["start", "stop", "step"], [value.start, value.stop, value.step]
    return None


def _sort_key(value: Any) -> str:
    """Return a text that depends on class and bits alone: the order of a set depends on more."""
    if isinstance(value, (set, frozenset)):  # not through _parts, which would sort every level again
        inside = ",".join(sorted(map(_sort_key, value)))
    elif (parts := _parts(value)) is not None:
        inside = ",".join(map(_sort_key, parts[2]))
    else:
        inside = repr(_bits(value))
    return f"{type(value).__name__}({inside})"


def _bits(value: Any) -> object:
    if type(value) is float:
        return struct.pack(">d", value)
    if type(value) is complex:
        return struct.pack(">dd", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return str(value.dtype), tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return str(value.device), value.get_state().numpy().tobytes()
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    return repr(value)
