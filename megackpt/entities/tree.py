"""Nested dicts and lists of a state dict: walked, mapped, split and merged, with the path of every leaf.

Paths are written as in Python, `optimizer.groups[0].lr`, and errors about a leaf name its path.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Set
from functools import reduce
from typing import Any, TypeAlias

from megackpt.errors import DeclarationError

Steps: TypeAlias = tuple[object, ...]
"""The dict keys and list positions that lead to a leaf; different leaves have different steps."""

ABSENT = object()
"""The value that a mapping function returns to leave a leaf out."""


class Positions(dict[int, Any]):
    """The remaining items of a list that lost some, by position, until `merge` adds the others."""


def iter_leaves(
    tree: Any,
    path: Any = "",  # a str, or what step takes and returns
    *,
    step: Callable[[Any, object], Any] | None = None,
) -> Iterator[tuple[Any, Any]]:
    """Yield `(path, leaf)`, dicts and lists in order. Anything but a dict or a list is a leaf.

    step is as for `map_leaves`.
    """
    for key, child in _children(tree).items():
        inner = (step or join)(path, key)
        if isinstance(child, (dict, list)):
            yield from iter_leaves(child, inner, step=step)
        else:
            yield inner, child


def empty_containers(tree: Any, steps: Steps = ()) -> Iterator[Steps]:
    """Yield the steps to every empty dict and list below the tree itself."""
    for key, child in _children(tree).items():
        if isinstance(child, (dict, list)):
            if child:
                yield from empty_containers(child, (*steps, key))
            else:
                yield (*steps, key)


def keys_by_container(keys: Iterable[str], names: Set[str], but: Container[str] = ()) -> dict[str, list[str]]:
    """Return the keys below each container; names are the paths of containers, joined with dots.

    Keys in but are left out. A key belongs to the innermost of the containers.
    """
    keys_of: dict[str, list[str]] = {}
    for key in keys if names else ():
        name = key.rpartition(".")[0]
        while name and name not in names:
            name = name.rpartition(".")[0]
        if name and key not in but:
            keys_of.setdefault(name, []).append(key)
    return keys_of


def map_leaves(
    fn: Callable[[Any, Any], Any],
    tree: Any,
    path: Any = "",  # a str, or what step takes and returns
    *,
    step: Callable[[Any, object], Any] | None = None,
) -> Any:
    """Return a tree with `fn(path, leaf)` in place of each leaf; the given tree is not changed.

    A container whose leaves all stay the same is returned itself, so that its type stays (an OrderedDict).
    Leaves for which fn returns ABSENT are left out. A list that loses leaves becomes Positions. A container
    that loses all leaves is left out itself; one that was empty stays.

    Args:
        fn: takes the path and the leaf.
        tree: nested dicts and lists.
        path: the path of the tree.
        step: appends a dict key or list index to a path; None for `join`.
    """
    if not isinstance(tree, (dict, list)):
        return fn(path, tree)
    children, append = _children(tree), step or join
    mapped, is_same = {}, True
    for key, child in children.items():
        inner = append(path, key)
        if isinstance(child, (dict, list)):
            value = map_leaves(fn, child, inner, step=step)
        else:
            value = fn(inner, child)
        is_same = is_same and value is child
        if value is not ABSENT:
            mapped[key] = value
    if children and not mapped:
        return ABSENT
    if is_same:
        return tree
    if isinstance(tree, list) and len(mapped) == len(tree):
        return list(mapped.values())
    return Positions(mapped) if isinstance(tree, (list, Positions)) else mapped


def without_positions(tree: Any) -> Any:
    """Return the tree with plain dicts in place of Positions, for storage; the rest is not changed."""
    if not isinstance(tree, (dict, list)):
        return tree
    children = _children(tree)
    plain = {key: without_positions(child) for key, child in children.items()}
    if isinstance(tree, Positions):
        return plain
    if all(plain[key] is child for key, child in children.items()):
        return tree
    return plain if isinstance(tree, dict) else list(plain.values())


def without_empty(tree: Any) -> Any:
    """Return the tree without empty dicts and lists; ABSENT if nothing is left."""
    if not isinstance(tree, (dict, list)):
        return tree
    kept = {key: without_empty(child) for key, child in _children(tree).items()}
    kept = {key: child for key, child in kept.items() if child is not ABSENT}
    return kept or ABSENT


def merge(base: Any, other: Any, path: str = "") -> Any:
    """Return the union of two trees that `map_leaves` has split.

    Where both have a leaf, the leaf of `other` is taken.

    Positions become a list again if the two trees have all positions, else a plain dict. base may have plain
    dicts in place of Positions (see `without_positions`): one side that has a list is enough.

    Raises:
        DeclarationError: base has a leaf where other has a dict or list, or a list has gaps.
    """
    if isinstance(base, (dict, list)) and isinstance(other, (dict, list)):
        if not other:
            return base  # unchanged, because it may be a subclass such as OrderedDict
        return _merge_containers(base, other, path)
    if isinstance(other, (dict, list)):
        raise DeclarationError(
            f"The state dict and the checkpoint differ in structure at {path or 'the top'!r}: one has "
            f"{type(base).__name__}, the other {type(other).__name__}. Ask for the structure that was saved.",
            path=path,
        )
    return other


def join(path: str, key: object) -> str:
    """Append a dict key (or, an int, a list index) to a path.

    >>> join("model", "weight"), join("groups", 0), join("", "a")
    ('model.weight', 'groups[0]', 'a')
    """
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def join_dotted(path: str, key: object) -> str:
    """Append a dict key or list index to a path joined with dots, which is the key of leaves without a key.

    torch.distributed.checkpoint names the leaves of a nested state dict in the same way.

    >>> join_dotted("optimizer.state", 0), join_dotted("", "model")
    ('optimizer.state.0', 'model')
    """
    return f"{path}.{key}" if path else str(key)


def add_step(steps: Steps, key: object) -> Steps:
    """Append a dict key or list index to the steps that lead to a leaf."""
    return (*steps, key)


def path_of(steps: Steps) -> str:
    """Return the path of a leaf as it is written in Python.

    >>> path_of(("optimizer", "groups", 0, "lr"))
    'optimizer.groups[0].lr'
    """
    return reduce(join, steps, "")


def dotted(steps: Steps) -> str:
    """Return steps joined with dots by `join_dotted`; different steps may give the same text.

    >>> dotted(("a", "b")), dotted(("a.b",))
    ('a.b', 'a.b')
    """
    return reduce(join_dotted, steps, "")


def shown(steps: Steps) -> str:
    """Return steps as text for messages; different steps give different texts.

    >>> shown(("a", "b", 0)), shown(("a.b",)), shown((0,)), shown(("0",))
    ("['a']['b'][0]", "['a.b']", '[0]', "['0']")
    """
    return "".join(f"[{step!r}]" for step in steps)


def same_name_error(
    name: str, leaves: Iterable[Steps], what: str = "tensors of the state dict"
) -> DeclarationError:
    """Return the error for leaves at different steps that have one name; what describes the leaves."""
    first, second, *_ = sorted(map(shown, leaves))
    return DeclarationError(
        f"{name!r}: two {what} have this name, which is a path joined with dots: {first} and {second}. "
        f"Rename one of the dict keys on the way to them.",
        key=name,
    )


class PathKeys:
    """The keys of leaves whose key is their path joined with dots, each given to one leaf only."""

    def __init__(self) -> None:
        self._steps: dict[str, Steps] = {}

    def key_of(self, steps: Steps) -> str:
        """Return the key of a leaf, and reserve it.

        Raises:
            DeclarationError: another leaf has the key; the text names both paths.
        """
        key = dotted(steps)
        if self._steps.setdefault(key, steps) != steps:
            raise same_name_error(key, [self._steps[key], steps])
        return key


def _children(tree: dict[Any, Any] | list[Any]) -> dict[Any, Any]:
    """Return the children of a container by key or position."""
    return tree if isinstance(tree, dict) else dict(enumerate(tree))


def _merge_containers(base: dict[Any, Any] | list[Any], other: dict[Any, Any] | list[Any], path: str) -> Any:
    left = _children(base)
    merged = dict(left)
    for key, value in _children(other).items():
        step = join(path, key)
        merged[key] = merge(left[key], value, step) if key in left else without_positions(value)
    is_whole = sorted(merged, key=repr) == sorted(range(len(merged)), key=repr)
    if isinstance(base, list) or isinstance(other, list):
        if not is_whole:
            raise DeclarationError(
                f"The list at {path!r} has positions {sorted(merged, key=repr)}, which is not a whole list. "
                f"The checkpoint holds another number of elements than the state dict asks for.",
                path=path,
            )
    elif not (is_whole and isinstance(other, Positions)):
        return merged
    return [merged[i] for i in range(len(merged))]
