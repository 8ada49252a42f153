"""A causal convolution over the sequence with a filter for each channel; channels are cut over tp and cp."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.training.parallel.collectives import copy_to_neighbours
from megackpt.training.parallel.context import head_copies, own_heads
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.linear import divide_components_over_tp
from megackpt.training.parallel.mixin import ShardedModule
from megackpt.training.parallel.tp_sharding import TpSharding


class CausalConv1d(ShardedModule):
    """Each channel is a weighted sum of a token and the `kernel_size - 1` before it. Local.

    Input and output `[s, b, channels/tp]`: s counts all tokens of the sequences, before which there are
    zeros. weight `[channels/tp, 1, kernel_size]`, bias `[channels/tp]`. With context parallelism a rank
    filters the channels of its heads, as `tokens_to_heads` returns them, and uses their rows of the weight.

    Args:
        channels: names and extents of the components of the channels, such as queries, keys and values. Each
            is cut over tp and stored as an array of its own.
        kernel_size: tokens that a filter sees.
        groups: the ranks around this one.
        bias: whether there is a bias.
        heads: by component, how many heads this rank of tp has of it. None if no component is cut over cp.
        copies: by component, how many neighbouring ranks of tp have the same slice, for components that are
            cut into fewer slices than there are ranks. Their gradients are summed over these ranks, so that
            the backward pass is collective over tp.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: tp does not divide a component, or copies do not divide tp.

    Source: Mamba, section 3.4; stored as in Megatron-Core (`conv1d.weight.x`).
    """

    def __init__(
        self,
        channels: Mapping[str, int],
        kernel_size: int,
        groups: ParallelGroups,
        *,
        bias: bool = True,
        heads: Mapping[str, int] | None = None,
        copies: Mapping[str, int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        copies = {} if copies is None else copies
        components = divide_components_over_tp("channels", channels, copies, groups)
        sharding = TpSharding(dim=0, components=components, copies=copies)
        super().__init__(groups, tp_sharding={"weight": sharding, "bias": sharding})
        self.local_components = components
        self.heads = heads
        count = sum(components.values())
        self.shared_rows = sharding.shared_rows(count)
        self.weight = nn.Parameter(torch.empty(count, 1, kernel_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(count, dtype=dtype, device=device)) if bias else None
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the filtered channels, shaped like `x`."""
        tp = self.groups.tp
        weight = copy_to_neighbours(self.weight, tp, self.shared_rows)
        bias = None if self.bias is None else copy_to_neighbours(self.bias, tp, self.shared_rows)
        weight, bias = self._own_rows(weight), None if bias is None else self._own_rows(bias)
        count, _, kernel_size = weight.shape
        padded = F.pad(x.permute(1, 2, 0), (kernel_size - 1, 0))  # [b, channels/tp, kernel_size - 1 + s]
        return F.conv1d(padded, weight, bias, groups=count).permute(2, 0, 1)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the components of channels that were filtered, in order. Local."""
        sizes = self.local_components
        if self.heads is not None:
            cp = self.groups.cp
            sizes = {n: size * head_copies(self.heads[n], cp) // cp.size for n, size in sizes.items()}
        return torch.split_with_sizes(x, list(sizes.values()), dim=-1)

    def _own_rows(self, x: Tensor) -> Tensor:
        """Return the rows of a parameter for the channels that this rank of cp filters."""
        if self.heads is None or self.groups.cp.size == 1:
            return x
        parts = torch.split_with_sizes(x, list(self.local_components.values()))
        heads = [self.heads[name] for name in self.local_components]
        return torch.cat([own_heads(*part, self.groups.cp) for part in zip(parts, heads, strict=True)])
