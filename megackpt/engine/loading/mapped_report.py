"""The report of a load from another family's names, by our arrays, and the rules for their dtypes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from megackpt.entities import ShardedTensor
from megackpt.entities.describe import dtype_name
from megackpt.errors import MismatchError, truncated_list
from megackpt.ground.notices import notice
from megackpt.maps import RegionMap
from megackpt.maps.requests import MappedTensor, parameter_key
from megackpt.options import Policy
from megackpt.plans.metadata import ArraySpec
from megackpt.plans.validation import ArrayReport, LoadRules

log = logging.getLogger(__name__)


def check_casts(
    tensors: Sequence[ShardedTensor],
    parts: Sequence[Sequence[MappedTensor]],
    stored: Mapping[str, ArraySpec],
    rules: LoadRules,
    *,
    where: str,
) -> None:
    """Apply the rules to tensors whose dtype is not the stored one; floats may be cast without a rule.

    Args:
        tensors: the request.
        parts: of each tensor, its boxes in the other family.
        stored: the arrays of the checkpoint.
        rules: what to do about differences; the keys are ours.
        where: the checkpoint, for errors.

    Raises:
        MismatchError: a rule makes a cast an error, or it is one between floats and integers.
    """
    casts: dict[str, str] = {}
    faults = []
    for tensor, of_tensor in zip(tensors, parts, strict=True):
        for part in of_tensor:
            spec, dtype = stored[part.theirs.key], dtype_name(tensor.dtype)
            if spec.dtype == dtype or tensor.key in casts:
                continue
            casts[tensor.key] = (
                f"{tensor.key!r}: {spec.key!r} is stored as {spec.dtype}, asked for as {dtype}"
            )
            are_floats = "float" in spec.dtype and tensor.dtype.is_floating_point
            default = Policy.IGNORE if are_floats else Policy.ERROR
            policy = rules.policy("cast", tensor.key, default=default)
            if policy is Policy.ERROR:
                faults.append(tensor.key)
            elif policy is Policy.WARN:
                notice(log, f"{where}: {casts[tensor.key]}")
    if faults:
        raise MismatchError(
            f"{where} holds other dtypes than asked for:\n{truncated_list([casts[key] for key in faults])}\n"
            f"Ask for them as they are stored, or load without a KeyRule that makes a cast an error.",
            key=faults[0],
            path=where,
        )


def report_mapped_arrays(
    tensors: Sequence[ShardedTensor],
    parts: Sequence[Sequence[MappedTensor]],
    stored: Mapping[str, ArraySpec],
    made: RegionMap,
) -> tuple[ArrayReport, ...]:
    """Return how each array of a request is loaded, under our keys; arguments as for `check_casts`."""
    by_key: dict[str, list[tuple[ShardedTensor, Sequence[MappedTensor]]]] = {}
    for tensor, of_tensor in zip(tensors, parts, strict=True):
        by_key.setdefault(tensor.key, []).append((tensor, of_tensor))
    return tuple(_report(key, by_key[key], stored, made) for key in sorted(by_key))


def _report(
    key: str,
    requests: Sequence[tuple[ShardedTensor, Sequence[MappedTensor]]],
    stored: Mapping[str, ArraySpec],
    made: RegionMap,
) -> ArrayReport:
    first = requests[0][0]
    views = [part.theirs for _, of_tensor in requests for part in of_tensor]
    dtype, width = dtype_name(first.dtype), first.dtype.itemsize
    asked = sum(tensor.data.numel() for tensor, _ in requests if tensor.data is not None)
    filled = sum(view.data.numel() for view in views if view.data is not None)
    return ArrayReport(
        key=key,
        stored_dtype=", ".join(sorted({stored[view.key].dtype for view in views})) or dtype,
        dtype=dtype,
        stored_shape=made.left[parameter_key(key)].stored,
        global_shape=first.global_shape,
        nbytes=asked * width,
        padded_nbytes=(asked - filled) * width,
        resharded=True,
    )
