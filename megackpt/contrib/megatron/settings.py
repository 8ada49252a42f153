"""Settings of programs: attributes of strategies, where an unknown one is an error, and of the process.

Megatron-LM sets some of a strategy's attributes after it was made. A misspelt one, or one of another version,
would silently have no effect.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, ClassVar, Literal, TypeAlias

from megackpt.options import LoadOptions, Policy, SaveOptions

Replicas: TypeAlias = Literal["warn", "error", "off"]


class KnownSettings:
    """A base class whose public attributes can be set only if a class names them in SETTINGS.

    Subclasses outside of megackpt may have attributes of their own.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and type(self).__module__.startswith(__package__ or ""):
            known = {name for cls in type(self).__mro__ for name in getattr(cls, "SETTINGS", ())}
            if name not in known:
                raise AttributeError(
                    f"{type(self).__name__} has no setting {name!r}, so setting it would have no effect. "
                    f"It has {', '.join(sorted(known)) or 'none'}.",
                    name=name,
                    obj=self,
                )
        super().__setattr__(name, value)


# Options of the Megatron-Core face as a whole, which a program gives to `install()`.


@dataclass
class ProcessOptions:
    """Options that no signature of Megatron-Core has a place for.

    Attributes:
        silent_cast: a load converts values that are stored in another dtype, as Megatron-Core does, where
            megackpt raises an error.
        replicas: what a save does if ranks declare the same object and have different values, or the same
            chunk of a tensor and have different bits in samples of it: "warn", "error" or "off".
        gather_optimizer: the distributed optimizer gathers its state for `fully_reshardable`, as in
            Megatron-Core.
        save_options: how to save, but for what a strategy is set to.
        load_options: how to load, but for what a strategy is set to.
    """

    silent_cast: bool = False
    replicas: Replicas = "warn"
    gather_optimizer: bool = False
    save_options: SaveOptions = field(default_factory=SaveOptions)
    load_options: LoadOptions = field(default_factory=LoadOptions)

    @property
    def replica_policy(self) -> Policy:
        """`replicas` as the policy of `SaveOptions.sample_replicas`."""
        return {"warn": Policy.WARN, "error": Policy.ERROR, "off": Policy.IGNORE}[self.replicas]


OPTIONS = ProcessOptions()
"""Those of this process."""


# Which version of Megatron-Core a program uses: positional arguments differ between versions.

_NEWEST_KNOWN = "0.19.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreVersion:
    """A version of Megatron-Core.

    Attributes:
        text: the version, such as `0.16.1`.
        source: where it was found, as a clause for errors.
    """

    text: str
    source: str

    @property
    def has_common_strategy(self) -> bool:
        """Whether `save` and `load` take `common_strategy` as their fourth argument: up to 0.18."""
        numbers = [int(number) for number in re.findall(r"\d+", self.text)[:2]]
        return numbers < [0, 19]


def core_version() -> CoreVersion:
    """Return the version of Megatron-Core that is imported, else installed, else the newest known. Local.

    Nothing is imported. A checkout of Megatron-LM that was not installed is found once it is imported.
    """
    imported = getattr(sys.modules.get("megatron.core"), "__version__", None)
    if isinstance(imported, str):
        return CoreVersion(text=imported, source="which is imported")
    try:
        return CoreVersion(text=metadata.version("megatron-core"), source="which is installed")
    except metadata.PackageNotFoundError:
        return CoreVersion(text=_NEWEST_KNOWN, source="the newest known one, as none is installed")
