"""Which version of Megatron-Core a program uses: positional arguments differ between versions."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata

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
