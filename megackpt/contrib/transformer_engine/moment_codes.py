"""Moments and masters of Transformer Engine's FusedAdam as the codes that it keeps, with their scales.

The codes are stored as they are in memory, in arrays of their own dtype, so a moment of 8 bits has a byte for
each element. A scale belongs to the slice of a parameter that a rank has. The keys are

    optimizer.codes.<state>.<dtype>.<model key>            of the shape of the parameter
    optimizer.scale_of_codes.<state>.<dtype>.<model key>   [layers, slices]

so that codes never load as values, or as codes of another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from torch import Tensor

from megackpt.entities import ReplicaId, ShardedTensorFactory
from megackpt.errors import DeclarationError
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    cuts_of_entity,
    make_own_array,
    make_sharded_optimizer_tensor,
)

Moments: TypeAlias = Literal["portable", "codes"]


class MomentCodes(NamedTuple):
    """What a load returns for a state that is stored as codes.

    Attributes:
        codes: of the parameter's shape; float8 as uint8.
        scale: 0-dim float32, by which codes are multiplied; None for bfloat16.
    """

    codes: Tensor
    scale: Tensor | None


def check_moments(form: str) -> Moments:
    """Return `form` if it is a choice.

    Raises:
        DeclarationError: it is not.
    """
    if form not in get_args(Moments):
        raise DeclarationError(f"moments is {form!r}. Give one of {list(get_args(Moments))}.")
    return form  # type: ignore[return-value]


def declare_codes(entity: ParamEntity, codes: MomentCodes, *, state: str, dtype: str) -> ShardedTensorFactory:
    """Declare codes, which a load fills in place, and their scale. Local.

    Args:
        entity: of the parameter.
        codes: as the optimizer has them, with a copy of the scale.
        state: name of the state in keys.
        dtype: name of the codes' dtype in keys.

    Raises:
        DeclarationError: the parameter is cut into slices of different sizes, whose scales have no numbers.
    """
    cuts = cuts_of_entity(entity)
    if cuts is None and codes.scale is not None:
        raise DeclarationError(
            f"{entity.key!r}: its slices have different sizes, so that the scales of their {dtype} codes "
            f'have no places in an array. Declare the optimizer with moments="portable".',
            key=entity.key,
        )
    stored = _StoredCodes(entity, codes.scale, f"{state}.{dtype}", cuts or ())
    return ShardedTensorFactory(
        f"optimizer.codes.{state}.{dtype}.{entity.key}",
        codes.codes,
        stored.build,
        stored.merge,
        entity.replica_id,
        how=f"{state} of FusedAdam from stored {dtype} codes",
        advice=(
            "Codes of FusedAdam load into states of the same dtype, and if they have scales, at the same tp "
            'and ep. Save and load moments="portable" (float32 values) for others.'
        ),
    )


@dataclass(frozen=True)
class _StoredCodes:
    """What is stored of one state: the functions of its factory.

    Attributes:
        entity: of the parameter.
        scale: of this rank's slice, or None.
        name: state and dtype, as they are in keys.
        cuts: which slice it is, as for `make_own_array`.
    """

    entity: ParamEntity
    scale: Tensor | None
    name: str
    cuts: Sequence[tuple[int, int]]

    def build(
        self, key: str, codes: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> dict[str, Any]:
        """Declare the codes and their scale."""
        del key, replica_id, flattened_range  # those of the entity
        built: dict[str, Any] = {
            "codes": make_sharded_optimizer_tensor(self.entity, codes, f"optimizer.codes.{self.name}")
        }
        if self.scale is not None:
            prefix = f"optimizer.scale_of_codes.{self.name}"
            built["scale"] = make_own_array(self.entity, self.scale, prefix=prefix, cuts=self.cuts)
        return built

    def merge(self, loaded: dict[str, Tensor]) -> MomentCodes:
        """Return what was loaded."""
        return MomentCodes(loaded["codes"], loaded.get("scale"))
