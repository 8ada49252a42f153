"""Comparison of a checkpoint with what all ranks request: stored keys that no rank requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megackpt.errors import MissingKeyError, truncated_list
from megackpt.plans.validation.globs import escaped, globs_for, rules_text
from megackpt.plans.validation.request import LoadRules, apply_policies


def check_missing_keys(
    asked: Iterable[str],
    stored: Iterable[str],
    rules: LoadRules,
    *,
    where: str,
    our_names: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """Return the stored keys that are not in asked, the requested keys of all ranks.

    our_names has the names in the request of stored keys, as text, if they differ.

    Raises:
        MissingKeyError: rules make some of them errors. All of these are listed.
    """
    missing = sorted(set(stored) - set(asked))

    def error(keys: list[str]) -> MissingKeyError:
        lines = [repr(key) for key in keys]
        if our_names:
            lines = [f"{key!r} (ours: {our_names.get(key, 'none in the map')})" for key in keys]
        return MissingKeyError(
            f"{where} holds {len(keys)} keys that no rank asks "
            f"for:\n{truncated_list(lines)}\n"
            f"Ask for them, or leave them: by a mode of strict=, without complete=True, or with "
            f"{rules_text(globs_for(keys), 'missing=Policy.IGNORE')}.",
            key=keys[0],
            path=where,
        )

    apply_policies(missing, rules.on_missing, error)
    return frozenset(missing)


def check_empty_containers(lost: Mapping[str, Iterable[str]], rules: LoadRules, *, where: str) -> None:
    """Apply the rules to stored keys below empty dicts or lists of the request.

    Args:
        lost: by the name of each container, the keys below it that no rank requests.
        rules: what to do about them.
        where: the checkpoint, for errors.

    Raises:
        MissingKeyError: rules make some of them errors. The text names each container and how many keys are
            below it.
    """
    container_of = {key: name for name, keys in lost.items() for key in keys}

    def error(keys: list[str]) -> MissingKeyError:
        inside: dict[str, list[str]] = {}
        for key in keys:
            inside.setdefault(container_of[key], []).append(key)
        lines = [f"{name!r}: {len(lost)} keys, {lost[0]!r} for one" for name, lost in sorted(inside.items())]
        globs = [f"{escaped(name)}.*" for name in sorted(inside)]
        return MissingKeyError(
            f"{where} holds arrays or objects where the state dict has an empty dict or list, so none of "
            f"them would be loaded:\n{truncated_list(lines)}\n"
            f"If it is the state of an optimizer that has not taken a step yet, call "
            f"megackpt.training.optim.initialise_state(optimizer) before optimizer.state_dict(). "
            f"To load without them, leave the empty container out of the state dict, or load with "
            f"{rules_text(globs, 'missing=Policy.IGNORE')}.",
            key=keys[0],
            path=where,
        )

    apply_policies(sorted(container_of), rules.on_empty_container, error)
