"""Sharded state dicts, picked apart and renamed, and nested logging.

Source: Megatron-Core `dist_checkpointing.utils`, for names and behaviour.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megackpt.contrib.megatron.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megackpt.entities import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from megackpt.entities.tree import iter_leaves
from megackpt.errors import DeclarationError

__all__ = [
    "add_prefix_for_sharding",
    "apply_prefix_mapping",
    "debug_msg",
    "debug_time",
    "extract_nonpersistent",
    "extract_sharded_base",
    "extract_sharded_tensors",
    "extract_sharded_tensors_and_factories",
    "extract_sharded_tensors_or_nonpersistent",
    "force_all_tensors_to_non_fp8",
    "logger_stack",
    "replace_prefix_for_sharding",
    "zip_strict",
]

fallback_logger = logging.getLogger(__name__)
_nesting: ContextVar[tuple[tuple[str, ...], logging.Logger]] = ContextVar(
    "nesting", default=((), fallback_logger)
)

Split = tuple[ShardedStateDict, StateDict]


def zip_strict(*args: Any) -> Iterator[tuple[Any, ...]]:
    """Return what `zip` does; iterables of different lengths are an error before anything is taken.

    Raises:
        DeclarationError: naming the lengths.
    """
    lists = [list(arg) for arg in args]
    lengths = [len(items) for items in lists]
    if len(set(lengths)) > 1:
        raise DeclarationError(
            f"Iterables of {lengths} elements cannot be paired one by one. Give iterables of equal lengths."
        )
    return zip(*lists, strict=True)


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> Split:
    """Return the ShardedTensors and everything else, each in the structure of the dict."""
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> Split:
    """Return the ShardedTensors and factories, and everything else."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """Return ShardedTensors, factories and non-persistent objects, and everything else."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> Split:
    """Return all sharded entities, and everything else."""
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """Return the non-persistent objects, and everything else."""
    return _split(sharded_state_dict, LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put `prefix` before the key of every sharded entity, in place. The dict keys stay.

    Source: Megatron-Core `dist_checkpointing.utils.add_prefix_for_sharding`.
    """
    for _, leaf in iter_leaves(sharded_state_dict):
        if isinstance(leaf, ShardedBase):
            leaf.key = prefix + leaf.key


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix of the key of every sharded entity, in place.

    Raises:
        DeclarationError: a key does not begin with the old prefix; no key was changed.
    """
    entities = _entities(sharded_state_dict)
    for entity in entities:
        if not entity.key.startswith(old_prefix):
            raise DeclarationError(
                f"The key {entity.key!r} does not begin with {old_prefix!r}. Give a prefix that all keys "
                f"have.",
                key=entity.key,
            )
    for entity in entities:
        entity.key = new_prefix + entity.key.removeprefix(old_prefix)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: dict[str, str]) -> None:
    """Replace in each key the first prefix of the map, `{old: new}`, that fits, in place; other keys stay."""
    for entity in _entities(sharded_state_dict):
        old = next((prefix for prefix in prefix_map if entity.key.startswith(prefix)), None)
        if old is not None:
            entity.key = prefix_map[old] + entity.key.removeprefix(old)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace tensors that Transformer Engine keeps quantised by what they stand for, in place."""
    for entity in _entities(sharded_state_dict):
        dequantize: Callable[[], Any] | None = getattr(entity.data, "dequantize", None)
        if dequantize is not None and type(entity.data).__module__.startswith("transformer_engine"):
            entity.data = dequantize()


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Nest a name and a logger for the time of the block; yield the joined names and the logger in force."""
    names, logger = _nesting.get()
    inner = ((*names, name) if name else names, current_logger or logger)
    token = _nesting.set(inner)
    try:
        yield ".".join(inner[0]), inner[1]
    finally:
        _nesting.reset(token)


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the block took, in seconds, if it was no less than the threshold.

    The level is DEBUG without a threshold and WARNING with one, unless it is given.
    """
    with logger_stack(name, logger) as (names, current):
        start = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - start
            default = logging.DEBUG if threshold == float("-inf") else logging.WARNING
            if took >= threshold:
                current.log(default if level is None else level, "%s took %.4fs", names, took)


def debug_msg(msg: str) -> None:
    """Log a message at DEBUG, with the names and by the logger in force."""
    names, current = _nesting.get()
    current.debug("%s %s", ".".join(names), msg)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return content metadata without the process group that Megatron-Core puts into it."""
    return None if metadata is None else {k: v for k, v in metadata.items() if k != "dp_cp_group"}


def _split(sharded_state_dict: ShardedStateDict, *kinds: type) -> Split:
    return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))


def _entities(sharded_state_dict: ShardedStateDict) -> list[ShardedBase]:
    return [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedBase)]
