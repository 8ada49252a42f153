"""What an adapter is made of: rank, scale and target layers, as plain values and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megackpt.errors import DeclarationError

_LARGEST = 3e38  # of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Choices of one adapter.

    Attributes:
        rank: extent between the two matrices of a layer's adapter.
        targets: ends of the names of layers, `"linear_proj"` or `"self_attention.linear_proj"`. Of a layer
            with named components, `"linear_qkv"` gives all of them one matrix A, and `"linear_qkv.q"` gives
            this component an A of its own, as Hugging Face models with separate projections have it.
        alpha: the adapter's output is multiplied by `alpha / rank`; None stands for `rank`.
        dropout: probability that an element of the adapter's input becomes 0.
        rank_stabilised: multiply by `alpha / sqrt(rank)` instead.
        dora: scale the rows of the adapted weight to lengths that are learned, too.

    Raises:
        DeclarationError: a value is out of range.

    Source: Hu et al. 2021, section 4.1; Kalajdzievski 2023 (rank_stabilised); Liu et al. 2024 (dora).
    """

    rank: int
    targets: tuple[str, ...]
    alpha: float | None = None
    dropout: float = 0.0
    rank_stabilised: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise DeclarationError(f"the rank of an adapter is {self.rank!r}. Give an integer of at least 1.")
        if isinstance(self.targets, str) or not all(isinstance(t, str) and t for t in self.targets):
            raise DeclarationError(f"targets is {self.targets!r}. Give a tuple of names, ('linear_qkv',).")
        if not self.targets:
            raise DeclarationError("an adapter has no targets. Name at least one layer, ('linear_qkv',).")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise DeclarationError(f"dropout of an adapter is {self.dropout!r}. Give a number in [0, 1).")
        if self.alpha is not None and not _is_number(self.alpha):
            raise DeclarationError(
                f"alpha of an adapter is {self.alpha!r:.80}. Give a finite number, or None."
            )

    @property
    def scale(self) -> float:
        """What the adapter's output is multiplied by."""
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return the choices as JSON values."""
        return {**asdict(self), "targets": list(self.targets)}

    @classmethod
    def from_json(cls, values: Any) -> LoRAConfig:
        """Return the choices that `to_json` returned.

        Raises:
            DeclarationError: entries are missing, unknown or out of range.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or not {"rank", "targets"} <= values.keys() <= names:
            raise DeclarationError(
                f"{values!r} is no stored LoRAConfig. Give a mapping of rank, targets and any of "
                f"{', '.join(sorted(names - {'rank', 'targets'}))}."
            )
        return cls(**{**values, "targets": tuple(values["targets"])})


def _is_number(value: object) -> bool:
    """Return whether a value is a number that a float32 can be multiplied by."""
    is_typed = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_typed and -_LARGEST < value < _LARGEST  # type: ignore[operator]  # NaN is not
