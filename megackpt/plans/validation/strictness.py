"""The modes of `strict`: what a load does about keys that only the request or only the checkpoint has.

A key is unexpected if it is requested and not in the checkpoint, and missing if it is in the checkpoint and
no rank requests it.

Source: Megatron-Core `dist_checkpointing.validation.StrictHandling`.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

from megackpt.errors import DeclarationError
from megackpt.options import Policy


class StrictHandling(Enum):
    """What a load does about unexpected and missing keys.

    Only the modes `*_ALL` look for missing keys, because ranks have to exchange their requested keys for it.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @classmethod
    def of(cls, mode: StrictHandling | str) -> StrictHandling:
        """Return the mode that is given as such or by its value. Pure.

        Raises:
            DeclarationError: there is no such mode.
        """
        if isinstance(mode, cls):
            return mode
        try:
            return cls(mode)
        except ValueError as error:
            known = ", ".join(repr(m.value) for m in cls)
            raise DeclarationError(f"strict={mode!r} is not a mode. Give one of {known}.") from error

    @property
    def looks_for_missing_keys(self) -> bool:
        """Whether ranks exchange their requested keys."""
        return self in (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL)

    @property
    def returns_keys(self) -> bool:
        """Whether `load` returns missing and unexpected keys together with the state dict."""
        return self in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)

    @property
    def on_unexpected(self) -> Policy:
        """What to do about a key that the checkpoint lacks. If it is no error, nothing is loaded."""
        return _ON_UNEXPECTED[self]

    @property
    def on_missing(self) -> Policy:
        """What to do about a key that no rank requests."""
        return _ON_MISSING.get(self, Policy.IGNORE)


_ON_UNEXPECTED = {
    StrictHandling.ASSUME_OK_UNEXPECTED: Policy.ERROR,
    StrictHandling.LOG_UNEXPECTED: Policy.WARN,
    StrictHandling.LOG_ALL: Policy.WARN,
    StrictHandling.RAISE_UNEXPECTED: Policy.ERROR,
    StrictHandling.RAISE_ALL: Policy.ERROR,
    StrictHandling.RETURN_UNEXPECTED: Policy.IGNORE,
    StrictHandling.RETURN_ALL: Policy.IGNORE,
    StrictHandling.IGNORE_ALL: Policy.IGNORE,
}
_ON_MISSING = {StrictHandling.LOG_ALL: Policy.WARN, StrictHandling.RAISE_ALL: Policy.ERROR}

ReturnsKeys: TypeAlias = Literal[
    StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL, "return_unexpected", "return_all"
]
"""Modes that make `load` return also missing and unexpected keys."""

ReturnsState: TypeAlias = Literal[
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.LOG_UNEXPECTED,
    StrictHandling.LOG_ALL,
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
    StrictHandling.IGNORE_ALL,
    "assume_ok_unexpected",
    "log_unexpected",
    "log_all",
    "raise_unexpected",
    "raise_all",
    "ignore_all",
]
"""Modes that make `load` return the state dict only."""
