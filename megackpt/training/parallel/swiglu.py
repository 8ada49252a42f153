"""The activation of gated MLPs and experts: what is between gate and up, and the projection down."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError


@dataclass(frozen=True, slots=True, kw_only=True)
class SwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + up_offset)`, of values that may be clamped first.

    The defaults are the usual `silu(gate) * up`. GPT-OSS has alpha 1.702, a limit of 7 and an offset of 1.

    Attributes:
        alpha: factor on the gate inside of the sigmoid.
        limit: the gate is clamped from above to this value, and up to this value on both sides; None for
            neither.
        up_offset: added to up, after the clamp.

    Raises:
        DeclarationError: a limit that is not positive.

    Source: Shazeer 2020, equation 6; transformers `GptOssExperts`.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise DeclarationError(
                f"SwiGLU.limit is {self.limit}. It must be larger than 0, or None for no limit."
            )

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation of two tensors of one shape. Pure."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        gate = F.silu(gate) if self.alpha == 1 else gate * (self.alpha * gate).sigmoid()
        return gate * (up + self.up_offset) if self.up_offset else gate * up
