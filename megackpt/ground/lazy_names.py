"""Names of a package that are imported from their modules at their first use.

In the package, below the imports:

    if TYPE_CHECKING:
        from megackpt.comm.torch_group import TorchGroup
    else:  # type checkers would accept any name
        __getattr__ = lazy_names(__name__, {"megackpt.comm.torch_group": ("TorchGroup",)})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, names_by_module: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    Args:
        package: its name, for the text of an AttributeError.
        names_by_module: the names, by the module that defines them.
    """
    module_of = {name: module for module, names in names_by_module.items() for name in names}

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    return import_name
