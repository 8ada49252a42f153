"""Modules of other packages, whose classes have no `sharded_state_dict` of ours.

An integration registers one function for all classes of a package. Containers such as `ShardedModule` and
`LayerStack` then accept modules of that package, and of classes derived from them, as children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import nn

from megackpt.entities import RankOffset, ShardedStateDict
from megackpt.training.parallel.groups import ParallelGroups

Metadata: TypeAlias = Mapping[str, Any] | None  # hints of the caller, passed on to children


class ForeignDeclaration(Protocol):
    """Declares a module of another package; arguments and result are those of `declare_module`."""

    def __call__(
        self,
        module: nn.Module,
        groups: ParallelGroups,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: Metadata = None,
    ) -> ShardedStateDict:
        """Declare what this rank has of `module` and its children. Local."""
        ...


_declarations: dict[str, ForeignDeclaration] = {}


def register_package(package: str, declare: ForeignDeclaration) -> None:
    """Declare all modules by `declare` whose class, or a base class of it, is of a package. Local.

    Modules with a method `sharded_state_dict` keep it. A second call replaces the function.

    Args:
        package: the first part of the name of the classes' modules, such as "transformer_engine".
        declare: called with the arguments of `megackpt.training.parallel.sharded_state_dict`.
    """
    _declarations[package] = declare


def declaration_of(module: nn.Module) -> ForeignDeclaration | None:
    """Return the function registered for the package of the module's class or base class; None if none is."""
    packages = (base.__module__.partition(".")[0] for base in type(module).__mro__)
    return next((_declarations[package] for package in packages if package in _declarations), None)
