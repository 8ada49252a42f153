"""Our `dist_checkpointing` in the place of Megatron-Core's.

An import hook gives the same modules a second name, so a class is the same class under both names. It also
completes Megatron-Core's distributed optimizer, see `optimizer_ranges`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import get_args

from megackpt.contrib.megatron import optimizer_ranges
from megackpt.contrib.megatron.settings import OPTIONS, Replicas
from megackpt.errors import CheckpointError
from megackpt.ground.arguments import check_choice, check_flags, check_kind
from megackpt.options import LoadOptions, SaveOptions

THEIRS = "megatron.core.dist_checkpointing"
OURS = "megackpt.contrib.megatron.dist_checkpointing"


def install(
    *,
    silent_cast: bool = False,
    replicas: Replicas = "warn",
    gather_optimizer: bool = False,
    save_options: SaveOptions | None = None,
    load_options: LoadOptions | None = None,
) -> None:
    """Make `megatron.core.dist_checkpointing` and all its modules ours, in this process. Local.

    Call it before anything of Megatron-Core is imported: its modules take the classes when they are imported.
    Calling it again only changes the arguments. Megatron-Core itself need not be installed.

    Args:
        silent_cast: let `load` convert values that are stored in another dtype, as Megatron-Core does.
            Otherwise that is an error, which names the key and both dtypes.
        replicas: what `save` does if copies of an object on several ranks differ, or copies of a tensor, as
            samples show. "warn": as Megatron-Core, it stores the main replica, with a warning that names the
            key and the ranks. "error": it raises a MismatchError instead. "off": it compares none.
        gather_optimizer: what the distributed optimizer does where `fully_reshardable` is asked for. False:
            each rank saves and loads the ranges that it owns. True: as Megatron-Core, it gathers the state of
            all data-parallel ranks before a save. The checkpoint is the same.
        save_options: options that errors of a save propose, and others that no setting of a strategy gives.
            What a strategy is set to counts more.
        load_options: the same for loads.

    Raises:
        DeclarationError: an argument has another value.
        CheckpointError: Megatron-Core's own `dist_checkpointing` has been imported already.

    >>> from megackpt.contrib import megatron                    # doctest: +SKIP
    >>> megatron.install()                                      # doctest: +SKIP
    >>> from megatron.core.models.gpt import GPTModel           # doctest: +SKIP
    """
    check_flags(silent_cast=silent_cast, gather_optimizer=gather_optimizer)
    check_choice("replicas", replicas, get_args(Replicas))
    check_kind("save_options", save_options, SaveOptions, give="SaveOptions(...), or None", optional=True)
    check_kind("load_options", load_options, LoadOptions, give="LoadOptions(...), or None", optional=True)
    OPTIONS.silent_cast, OPTIONS.replicas = silent_cast, replicas
    OPTIONS.save_options = SaveOptions() if save_options is None else save_options
    OPTIONS.load_options = LoadOptions() if load_options is None else load_options
    OPTIONS.gather_optimizer = gather_optimizer
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    _check_not_imported()
    sys.meta_path.insert(0, _Finder())


def _check_not_imported() -> None:
    early = [name for name in sys.modules if name == THEIRS or name.startswith(THEIRS + ".")]
    if early:
        raise CheckpointError(
            f"megackpt.contrib.megatron.install() came too late: {early[0]} was imported already, and "
            f"modules that imported its classes would keep them. Call install() at the top of the program, "
            f"before the first import of megatron.core."
        )


class _Finder(MetaPathFinder):
    """Finds modules of Megatron-Core's `dist_checkpointing` in ours, and completes its optimizer."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is; None for a module that is not ours."""
        if fullname == optimizer_ranges.MODULE:
            return self._completed(fullname, path, target)
        if fullname != THEIRS and not fullname.startswith(THEIRS + "."):
            return None
        name = OURS + fullname.removeprefix(THEIRS)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ModuleNotFoundError(
                f"{fullname} is not offered by megackpt, which stands for "
                f"megatron.core.dist_checkpointing here "
                f"(see docs/megatron-compat.md).",
                name=fullname,
            ) from error
        return ModuleSpec(fullname, _Alias(module), is_package=hasattr(module, "__path__"))

    def _completed(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """Return where the other finders have a module, with a loader that completes it."""
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Completed(spec.loader)
        return spec


class _Alias(Loader):
    """Gives a module that exists a second name."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module as it is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        module.__spec__ = self._spec


class _Completed(Loader):
    """Loads the module of Megatron-Core's distributed optimizer, and lets it save ranges."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return what the module's own loader creates."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, give it its own loader back, and complete its class."""
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        optimizer_ranges.save_ranges_in(module)
