"""Comparison of a rank's request with the arrays of a checkpoint, before any byte is read.

`LoadRules` decide whether a difference is an error, is logged as a warning, or is ignored.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from megackpt.errors import CheckpointError, MismatchError, MissingKeyError, truncated_list
from megackpt.ground.notices import notice
from megackpt.ground.wrappers import without_wrappers
from megackpt.options import KeyRule, Policy
from megackpt.plans.metadata import OBJECT, ArraySpec, ChunkTable, DeclaredChunks
from megackpt.plans.planning import Copies
from megackpt.plans.validation.globs import globs_for, globs_with_states, rules_text
from megackpt.plans.validation.report import ArrayReport
from megackpt.plans.validation.strictness import StrictHandling

log = logging.getLogger(__name__)

Shape: TypeAlias = tuple[int, ...]


class LoadRules:
    """What a load does about each difference: the first rule for the key, else the default of the mode.

    Attributes:
        looks_for_missing_keys: whether missing keys matter, so that ranks exchange their requested keys.
    """

    def __init__(self, rules: Sequence[KeyRule], strict: StrictHandling, *, complete: bool = False) -> None:
        self._rules = rules
        self._strict = strict
        self._missing = Policy.ERROR if complete else strict.on_missing
        self.looks_for_missing_keys = (
            complete
            or strict.looks_for_missing_keys
            or any(rule.missing not in (None, Policy.IGNORE) for rule in rules)
        )

    def policy(self, difference: str, key: str, *, default: Policy) -> Policy:
        """Return what to do about a difference, named by its field of KeyRule."""
        for rule in self._rules:
            policy: Policy | None = getattr(rule, difference)
            if policy is not None and fnmatchcase(key, rule.keys):
                return policy
        return default

    def on_unexpected(self, key: str) -> Policy:
        """Return what to do about a key that the checkpoint lacks."""
        return self.policy("unexpected", key, default=self._strict.on_unexpected)

    def on_unexpected_plain(self, key: str) -> Policy:
        """Return what to do about a plain tensor for whose path the checkpoint has nothing.

        In the default mode that is a warning, not an error: the trees of Megatron-Core's models and
        optimizers may hold plain tensors that older checkpoints lack, and its load drops them.
        """
        is_default = self._strict is StrictHandling.ASSUME_OK_UNEXPECTED
        return self.policy(
            "unexpected", key, default=Policy.WARN if is_default else self._strict.on_unexpected
        )

    @property
    def about_missing_keys(self) -> list[str]:
        """The rules about missing keys as text, by which ranks compare them: all must decide equally."""
        if not self.looks_for_missing_keys:
            return []
        by_key = [f"{r.keys}: {r.missing.value}" for r in self._rules if r.missing is not None]
        return [f"*: {self._missing.value}", *by_key]

    def on_missing(self, key: str) -> Policy:
        """Return what to do about a key that no rank requests."""
        return self.policy("missing", key, default=self._missing)

    def on_empty_container(self, key: str) -> Policy:
        """Return what to do about a key that no rank requests, below an empty dict or list of the request.

        It is an error in the modes in which an unexpected key is one: such a request is usually the state of
        an optimizer that has not taken a step yet.
        """
        return self.policy("missing", key, default=self._strict.on_unexpected)


def check_unexpected_keys(
    asked: Iterable[str],
    stored: Mapping[str, ArraySpec | None],
    rules: LoadRules,
    *,
    where: str,
    plain: Container[str] = (),
    advice: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """Return the requested keys that are not stored; nothing must be loaded for them.

    Args:
        asked: the requested keys of this rank.
        stored: the arrays of the checkpoint, by key; None for one of which only the key is known.
        rules: what to do about them.
        where: the checkpoint, for errors.
        plain: those of the requested keys that are paths of plain tensors, not keys of entities. They are
            judged less strictly, unless all requested keys are missing, or the checkpoint has the same name
            with other wrappers (`_orig_mod`).
        advice: what to do about single keys, for the error.

    Raises:
        MissingKeyError: rules make some of them errors. All of these are listed, each with the most similar
            stored key.
    """
    known, wanted = set(stored), set(asked)
    unexpected = sorted(wanted - known)
    # Where nothing at all is found, the names differ, and a warning would leave the model as it was.
    is_nothing_found = len(unexpected) == len(wanted)
    wrapped = _with_other_wrappers(unexpected, known - wanted) if unexpected else {}

    def error(keys: list[str]) -> MissingKeyError:
        lines: list[str] = []
        for key in keys:
            # Finding similar keys is slow, and only the first lines are shown.
            stacked = _stack_of(key, stored)
            close = difflib.get_close_matches(key, known, n=1) if len(lines) < 10 and not stacked else []
            hint = stacked or (f" (the checkpoint has {close[0]!r})" if close else "")
            lines.append(f"{key!r}{hint}")
        rules_to_paste = rules_text(globs_for(keys), "unexpected=Policy.WARN")
        remedy = _rename_advice(keys, known, known & wanted) or _wrapper_advice(keys, wrapped, known & wanted)
        remedy = remedy or _fused_advice(keys, known, where)
        remedy = remedy or f"To keep them as they are: {rules_to_paste}."
        return MissingKeyError(
            f"{where} does not hold {len(keys)} of the keys asked for:\n{truncated_list(lines)}\n"
            f"{_advice_for(keys, advice)}Ask for what was saved, or list what is there with "
            f"megackpt.load_sharded_metadata(). {remedy}",
            key=keys[0],
            path=where,
        )

    def policy_of(key: str) -> Policy:
        is_lenient = key in plain and not is_nothing_found and key not in wrapped
        return rules.on_unexpected_plain(key) if is_lenient else rules.on_unexpected(key)

    apply_policies(unexpected, policy_of, error)
    return frozenset(unexpected)


def _stack_of(key: str, stored: Mapping[str, ArraySpec | None]) -> str:
    """Return how to ask for a layer whose array is stored as a part of a stack; "" if there is no stack."""
    steps = key.split(".")
    for at in [at for at, step in enumerate(steps) if step.isdigit()]:
        spec = stored.get(".".join(steps[:at] + steps[at + 1 :]))
        if spec is not None and spec.global_shape and int(steps[at]) < spec.global_shape[0]:
            return (
                f" (the checkpoint has {spec.key!r} {spec.global_shape}, with all layers stacked: ask with "
                f"from_rank_offsets({spec.key!r}, data, (0, {int(steps[at])}, {spec.global_shape[0]}), "
                f"prepend_axis_num=1))"
            )
    return ""


_PREFIX = re.compile(r"(\w+\.)+")
"""A prefix that is a pattern of itself."""


def _with_other_wrappers(missing: Iterable[str], stored: Iterable[str]) -> dict[str, list[str]]:
    """Return the stored keys that differ from a missing one by wrappers alone, by the missing key."""
    by_name: dict[str, list[str]] = {}
    for key in stored:
        by_name.setdefault(without_wrappers(key), []).append(key)
    names = {key: without_wrappers(key) for key in missing}
    return {key: by_name[name] for key, name in names.items() if name in by_name}


def _fused_advice(missing: Sequence[str], stored: Set[str], where: str) -> str:
    """Return how to load arrays of Megatron-Core, if missing keys name parts of those that it has fused."""
    parts, fused = (".linear_qkv.weight.q", ".weight.gate"), (".linear_qkv.weight", ".linear_fc1.weight")
    if not any(key.endswith(parts) for key in missing) or not any(key.endswith(fused) for key in stored):
        return ""
    optimizer = ", optimizer=declared" if any(key.startswith("optimizer.") for key in missing) else ""
    return (
        "The checkpoint is Megatron-Core's. In a clone: from models.megatron import megatron_state; "
        "megackpt.load("
        f"megatron_state(model, megackpt.load_sharded_metadata({where!r}){optimizer}), {where!r})."
    )


def _rename_advice(missing: Sequence[str], stored: Set[str], present: Set[str]) -> str:
    """Return the rename that finds all missing keys, if they lack one prefix or have one too many.

    It leaves the requested keys that the checkpoint has, `present`, as they are.
    """
    first = missing[0]
    lacking = sorted(
        prefix
        for key in stored
        if key.endswith(f".{first}") and _PREFIX.fullmatch(prefix := key.removesuffix(first))
        if all(prefix + key in stored for key in missing)
        if not any(key.startswith(prefix) and key.removeprefix(prefix) in stored for key in stored)
        if not any(key.startswith(prefix) for key in present)
    )
    if lacking:
        several = f" (or below {', '.join(map(repr, lacking[1:]))})" if len(lacking) > 1 else ""
        return f'Under other names it has them{several}: LoadOptions(rename={{"{lacking[0]}*": "*"}}).'
    steps = first.split(".") if not present else []
    for count in range(1, len(steps)):
        prefix = "".join(f"{step}." for step in steps[:count])
        is_plain = _PREFIX.fullmatch(prefix) is not None
        if is_plain and all(key.startswith(prefix) and key.removeprefix(prefix) in stored for key in missing):
            return f'Under other names it has them: LoadOptions(rename={{"*": "{prefix}*"}}).'
    return ""


_MOST_PATTERNS = 8  # that an error lists to be pasted


def _wrapper_advice(
    missing: Sequence[str], wrapped: Mapping[str, Sequence[str]], present: Iterable[str]
) -> str:
    """Return the rename that finds the keys that have other wrappers in the checkpoint.

    Where two keys differ from each other by wrappers alone, nothing says which of them is meant.

    Args:
        missing: keys that the checkpoint lacks.
        wrapped: the stored keys of those that it has with other wrappers.
        present: requested keys that it has.
    """
    names = Counter(map(without_wrappers, missing))
    is_one = {key: len(wrapped.get(key, ())) == 1 == names[without_wrappers(key)] for key in missing}
    pairs = {wrapped[key][0]: key for key in missing if is_one[key]}
    if not pairs:
        return ""
    # The first pattern that matches counts, so those of inner modules come first.
    patterns = dict(sorted((_pattern_of(*pair) for pair in pairs.items()), key=lambda p: -len(p[0])))

    def renamed(key: str) -> str:
        starts = ((old[:-1], new[:-1]) for old, new in patterns.items())
        return next((new + key.removeprefix(old) for old, new in starts if key.startswith(old)), key)

    if any(renamed(key) != new for key, new in (*pairs.items(), *zip(present, present, strict=True))):
        patterns = pairs
    those = "them" if len(pairs) == len(missing) else "some of them"
    if len(patterns) > _MOST_PATTERNS:
        return (
            f"It has {those} under the names of modules that are wrapped in another way (torch.compile, "
            f"FSDP). Wrap them as in the save, or give LoadOptions(rename={{stored: asked, ...}}) both names."
        )
    # As text of Python: JSON would write a character beyond 16 bits as two, which are not one there.
    literal = json.dumps(patterns, ensure_ascii=False)
    return f"Under the names of other wrappers it has {those}: LoadOptions(rename={literal})."


def _pattern_of(stored: str, asked: str) -> tuple[str, str]:
    """Return both names with `*` for the steps that they end with."""
    before, after = stored.split("."), asked.split(".")
    while before and after and before[-1] == after[-1]:
        before, after = before[:-1], after[:-1]
    return ".".join([*before, "*"]), ".".join([*after, "*"])


@dataclass(frozen=True, slots=True)
class UnpaddedShapes:
    """Shapes of arrays without their padding, by key, as far as they are known.

    Attributes:
        requested: those of the request.
        stored: those of the checkpoint.
    """

    requested: Mapping[str, Shape] = field(default_factory=dict)
    stored: Mapping[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AllowedDifferences:
    """The arrays of a request that are loaded although the stored ones have other shapes.

    Attributes:
        resized: keys of those that are padded or cut.
        grown: for those with more elements that are no padding than are stored: the shape of the stored
            elements. Elements outside of it keep their values.
        shrunk: for those with fewer elements that are no padding than are stored: the shape of their
            elements. Elements outside of it become 0.
    """

    resized: frozenset[str]
    grown: Mapping[str, Shape]
    shrunk: Mapping[str, Shape]


def check_dtypes_and_shapes(
    requested: DeclaredChunks,
    stored: Mapping[str, ArraySpec],
    rules: LoadRules,
    *,
    where: str,
    advice: Mapping[str, str] | None = None,
    unpadded: UnpaddedShapes | None = None,
) -> AllowedDifferences:
    """Compare the dtypes and global shapes of arrays; return the arrays that are padded or cut.

    Args:
        requested: the request of this rank.
        stored: the arrays of the checkpoint, by key.
        rules: what to do about differences.
        where: the checkpoint, for errors.
        advice: what to do about single keys, for the error.
        unpadded: shapes without padding, where they are known.

    Raises:
        MismatchError: rules, or the lack of one, make some differences errors. All of these are listed.
    """
    unpadded = unpadded or UnpaddedShapes()
    # A tensor with allow_shape_mismatch makes its array resizable: a default that rules may override.
    is_resizable = {int(a) for a in requested.table.array[requested.resizable]}
    resized: set[str] = set()
    grown: dict[str, Shape] = {}
    shrunk: dict[str, Shape] = {}
    faults: dict[str, tuple[str, tuple[str, ...]]] = {}  # by key: text, differences that a rule allows
    notices: list[tuple[str, str]] = []  # text of the array, and what happens to it
    for number, asked in enumerate(requested.table.arrays):
        spec = stored[asked.key]
        if asked == spec and asked.key not in unpadded.stored:
            continue
        difference = _compared(
            asked,
            spec,
            is_resizable=number in is_resizable,
            wanted=unpadded.requested.get(asked.key),
            filled=unpadded.stored.get(asked.key),
        )
        policies = {
            name: rules.policy(name, asked.key, default=default)
            for name, default in difference.defaults.items()
        }
        # Objects are never cast or resized, and arrays of other numbers of dims have no common elements.
        incomparable = OBJECT in (asked.dtype, spec.dtype)
        incomparable |= len(asked.global_shape) != len(spec.global_shape)
        if policies and (incomparable or Policy.ERROR in policies.values()):
            forbidden = tuple(name for name, policy in policies.items() if policy is Policy.ERROR)
            faults[asked.key] = difference.text, () if incomparable else forbidden
            continue
        if Policy.WARN in policies.values():
            notices.append((difference.text, difference.outcome))
        if asked.global_shape != spec.global_shape:
            resized.add(asked.key)
        if difference.grows:
            grown[asked.key] = unpadded.stored[asked.key]
        elif difference.shrinks:
            shrunk[asked.key] = unpadded.requested[asked.key]
    if faults:
        raise _shape_error(faults, requested, stored, where, advice, unpadded.stored.keys())
    for outcome in dict.fromkeys(outcome for _, outcome in notices):
        lines = [text for text, of_array in notices if of_array == outcome]
        end = f"\n{outcome}" if outcome else ""
        texts = f" {lines[0]}" if len(lines) == 1 else f"\n{truncated_list(lines)}"
        notice(log, f"{where}:{texts}{end}")
    return AllowedDifferences(frozenset(resized), grown, shrunk)


_NEW_KEEP = (
    "The checkpoint says how many rows are no padding, and the model has more: its new rows keep the values "
    "that they have."
)
_CUT_OR_ZERO = (
    "The checkpoint does not say which of its rows are padding, so rows that the model lacks are left out, "
    "and rows that the checkpoint lacks become 0."
)


class _Difference(NamedTuple):
    """How a stored array differs from a requested one.

    Attributes:
        text: the difference.
        defaults: the fields of KeyRule that name it, with what is done about each if no rule decides.
        outcome: what a load does to elements that only one side has; "" for what the option says.
        grows: whether elements that are no padding are not stored.
        shrinks: whether elements that are stored and no padding are padding of the request, or outside.
    """

    text: str
    defaults: Mapping[str, Policy]
    outcome: str = ""
    grows: bool = False
    shrinks: bool = False


def _compared(
    asked: ArraySpec, stored: ArraySpec, *, is_resizable: bool, wanted: Shape | None, filled: Shape | None
) -> _Difference:
    """Compare two arrays; wanted and filled are their shapes without padding, None where not known."""
    text = _difference_text(asked, stored)
    defaults = {"cast": Policy.ERROR} if asked.dtype != stored.dtype else {}
    if len(asked.global_shape) != len(stored.global_shape):
        return _Difference(text, defaults | {"padded": Policy.ERROR, "cut": Policy.ERROR})
    if not is_resizable:
        names = _larger_or_smaller(asked.global_shape, stored.global_shape)
        return _Difference(text, defaults | dict.fromkeys(names, Policy.ERROR))
    if filled is None:
        policies = dict.fromkeys(_larger_or_smaller(asked.global_shape, stored.global_shape), Policy.WARN)
        if wanted is not None and "padded" not in _larger_or_smaller(wanted, stored.global_shape):
            policies["padded"] = Policy.IGNORE  # only padding becomes 0
        return _Difference(text, defaults | policies, _CUT_OR_ZERO)
    names = _larger_or_smaller(wanted or asked.global_shape, filled)
    text += f"; without padding {filled} is stored"
    if wanted is None:  # it has room for all that is stored, or it has not
        return _Difference(text, defaults | {name: Policy.ERROR for name in names if name == "cut"})
    text += f", and the model has {wanted}"
    known = {name: Policy.WARN if name == "padded" else Policy.ERROR for name in names}
    grows, shrinks = "padded" in names, "cut" in names
    return _Difference(text, defaults | known, _NEW_KEEP if grows else "", grows, shrinks)


def _larger_or_smaller(asked: Shape, stored: Shape) -> list[str]:
    """Return the fields of KeyRule that name how a requested shape differs from a stored one."""
    pairs = list(zip(asked, stored, strict=True))
    larger, smaller = any(a > b for a, b in pairs), any(a < b for a, b in pairs)
    return ["padded"] * larger + ["cut"] * smaller


def _shape_error(
    faults: Mapping[str, tuple[str, tuple[str, ...]]],
    requested: DeclaredChunks,
    stored: Mapping[str, ArraySpec],
    where: str,
    advice: Mapping[str, str] | None,
    padded: Set[str],
) -> MismatchError:
    """Return the error for arrays; padded are the stored ones whose padding is known."""
    asked_dtypes = {a.key: a.dtype for a in requested.table.arrays}
    about_objects = (
        "Objects are never resharded: ask for them as they were saved, or leave their keys out. "
        if any(OBJECT in (asked_dtypes[key], stored[key].dtype) for key in faults)
        else ""
    )
    by_names: dict[tuple[str, ...], list[str]] = {}
    for key, (_, allows) in faults.items():
        if allows:
            by_names.setdefault(allows, []).append(key)
    rules = [
        f"KeyRule(keys={glob!r}, {', '.join(f'{name}=Policy.WARN' for name in names)})"
        for names, keys in by_names.items()
        for glob in (globs_with_states(keys) if set(keys) <= padded else globs_for(keys))
    ]
    ending = f", or load with LoadOptions(rules=({', '.join(rules)},))" if rules else ""
    return MismatchError(
        f"{where} holds other shapes or dtypes than asked for:\n"
        f"{truncated_list([text for text, _ in faults.values()])}\n"
        f"{_advice_for(faults, advice)}{about_objects}"
        f"Build the model with the sizes and dtypes it was saved with; set allow_shape_mismatch=True on a "
        f"tensor whose global shape may differ (a padded vocabulary){ending}.",
        key=next(iter(faults)),
        path=where,
    )


def _advice_for(keys: Iterable[str], advice: Mapping[str, str] | None) -> str:
    """Return the different sentences about these keys, each on a line of its own."""
    return "".join(
        f"{sentence}\n" for sentence in sorted({(advice or {}).get(key, "") for key in keys} - {""})
    )


def check_resharding(arrays: Iterable[ArrayReport], rules: LoadRules, *, where: str) -> None:
    """Apply the rules to arrays that were stored in other chunks than this rank requests.

    Raises:
        MismatchError: rules make some of them errors. All of these are listed.
    """

    def error(keys: list[str]) -> MismatchError:
        return MismatchError(
            f"{where} was saved at another layout: this rank's chunks of {len(keys)} arrays are not the "
            f"stored ones:\n"
            f"{truncated_list([repr(k) for k in keys])}\n"
            f"Load at the layout it was saved at, or with "
            f"{rules_text(globs_for(keys), 'resharded=Policy.IGNORE')}.",
            key=keys[0],
            path=where,
        )

    resharded = sorted(a.key for a in arrays if a.resharded)
    apply_policies(resharded, lambda key: rules.policy("resharded", key, default=Policy.IGNORE), error)


def report_arrays(
    requested: DeclaredChunks, stored: Mapping[str, ArraySpec], chunks: ChunkTable, copies: Copies
) -> tuple[ArrayReport, ...]:
    """Return how each array of one rank's request is loaded.

    Args:
        requested: the declarations of this rank.
        stored: the arrays of the checkpoint, by key.
        chunks: its chunks.
        copies: the load plan of this rank.
    """
    table = requested.table
    entities = int(requested.entity.max(initial=-1)) + 1
    filled = np.bincount(
        copies.entity, copies.shape.prod(axis=1).astype(np.float64), minlength=entities
    ).astype(np.int64)
    # Elements of a request that no copy fills are padding. Empty requests are neither padded nor resharded.
    numel = table.flat_stop - table.flat_start
    itemsize = np.where(numel > 0, table.nbytes // np.maximum(numel, 1), 0)
    padded = np.where(numel > 0, numel - filled[requested.entity], 0) * itemsize
    is_resharded = (numel > 0) & ~_is_one_whole_chunk(requested, chunks, copies, entities)
    # Sum the rows of each array up.
    arrays = len(table.arrays)
    nbytes = np.zeros(arrays, np.int64)
    np.add.at(nbytes, table.array, np.where(numel > 0, table.nbytes, 0))
    padded_nbytes = np.zeros(arrays, np.int64)
    np.add.at(padded_nbytes, table.array, padded)
    resharded = np.zeros(arrays, np.bool_)
    np.logical_or.at(resharded, table.array, is_resharded)
    columns = zip(table.arrays, nbytes.tolist(), padded_nbytes.tolist(), resharded.tolist(), strict=True)
    return tuple(
        ArrayReport(
            key=asked.key,
            stored_dtype=stored[asked.key].dtype,
            dtype=asked.dtype,
            stored_shape=stored[asked.key].global_shape,
            global_shape=asked.global_shape,
            nbytes=size,
            padded_nbytes=padding,
            resharded=any_resharded,
        )
        for asked, size, padding, any_resharded in columns
        if asked.dtype != OBJECT
    )


def _is_one_whole_chunk(
    requested: DeclaredChunks, chunks: ChunkTable, copies: Copies, entities: int
) -> npt.NDArray[np.bool_]:
    """Return which requested rows are equal to one stored chunk, from which they are loaded, `[n]`."""
    table = requested.table
    copy_count = np.bincount(copies.entity, minlength=entities)[requested.entity]
    # One of the stored chunks of each entity: the only one, where that is asked below.
    source = np.full(entities, -1, np.int64)
    source[copies.entity] = copies.stored
    chunk = source[requested.entity]
    if not len(chunks):
        return np.zeros(len(table), np.bool_)
    dims = min(table.dims, chunks.dims)  # rows are padded to the widest array, which may not be the same
    same: npt.NDArray[np.bool_] = (
        (copy_count == 1)
        & (table.start[:, :dims] == chunks.start[chunk, :dims]).all(axis=1)
        & (table.shape[:, :dims] == chunks.shape[chunk, :dims]).all(axis=1)
        & (table.flat_start == chunks.flat_start[chunk])
        & (table.flat_stop == chunks.flat_stop[chunk])
    )
    return same


def _difference_text(asked: ArraySpec, stored: ArraySpec) -> str:
    return (
        f"{asked.key!r}: stored as {stored.dtype} {stored.global_shape}, asked for as {asked.dtype} "
        f"{asked.global_shape}"
    )


def apply_policies(
    keys: list[str], policy_of: Callable[[str], Policy], error: Callable[[list[str]], CheckpointError]
) -> None:
    """Raise the error for the keys whose policy is ERROR, and log it for those whose policy is WARN."""
    # All keys are looked at before an error is raised, so that it lists all of them.
    by_policy: dict[Policy, list[str]] = {policy: [] for policy in Policy}
    for key in keys:
        by_policy[policy_of(key)].append(key)
    if by_policy[Policy.ERROR]:
        raise error(by_policy[Policy.ERROR])
    if by_policy[Policy.WARN]:
        notice(log, str(error(by_policy[Policy.WARN])))
