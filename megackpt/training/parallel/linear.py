"""Linear layers whose weight is cut over tp by output features (column) or by input features (row), or whole.

The column layer has fused forms: an output of named components (gate and up), and the query/key/value
projection with grouped queries. A column layer followed by a row layer needs one all-reduce in the forward
pass; with sequence parallelism it becomes an all-gather before them and a reduce-scatter after them.

Initial values are drawn from torch's global generator and depend on the layout; `models.init` shows how to
make them depend on the key only.

Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2. nn.Linear stores the
transpose of the papers' A, hence a column layer cuts dim 0 of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megackpt.errors import DeclarationError
from megackpt.training.parallel.attributes import mark
from megackpt.training.parallel.collectives import (
    copy_to,
    copy_to_neighbours,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_to,
)
from megackpt.training.parallel.groups import ParallelGroups
from megackpt.training.parallel.mixin import ShardedModule, check_copies
from megackpt.training.parallel.tp_sharding import TpSharding

INIT_STD = 0.02


def divide_over_tp(what: str, size: int, groups: ParallelGroups) -> int:
    """Return `size / tp`, the extent of one rank's slice of `what`; with `groups.experts`, `size / etp`.

    Pure.

    Raises:
        DeclarationError: tp does not divide `size`.
    """
    tp, axis = groups.tp.size, "etp" if groups.for_experts else "tp"
    if size % tp:
        raise DeclarationError(
            f"{what} {size} cannot be cut into {axis}={tp} equal slices. Choose a multiple of {tp}, or a "
            f"smaller {axis}.",
            rank=groups.rank,
        )
    return size // tp


def divide_components_over_tp(
    what: str, components: Mapping[str, int], copies: Mapping[str, int], groups: ParallelGroups
) -> dict[str, int]:
    """Return the extent of one rank's slice of each component of `what`, by name. Pure.

    Neighbouring ranks have the same slice of a component with copies, as many ranks as it has copies.

    Raises:
        DeclarationError: tp is not a multiple of the copies, or does not divide a component.
    """
    for name, count in copies.items():
        check_copies(f"component {name!r}", count, groups)
    return {
        # A component with copies is cut as if it were so many times as large.
        name: divide_over_tp(f"component {name!r} of {what}", size * copies.get(name, 1), groups)
        for name, size in components.items()
    }


def new_weights(
    shape: Sequence[int], *, bias: bool, dtype: torch.dtype | None, device: torch.device | str | None
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return a random weight of this shape, `[..., out, in]`, and a bias `[..., out]` of zeros, or None."""
    weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device).normal_(std=INIT_STD))
    return weight, nn.Parameter(torch.zeros(shape[:-1], dtype=dtype, device=device)) if bias else None


def split_components(y: Tensor, sizes: Mapping[str, int] | None) -> tuple[Tensor, ...]:
    """Return the components of an output, which have these extents of its last dim. Local.

    Raises:
        DeclarationError: the layer was made without components.
    """
    if sizes is None:
        raise DeclarationError(
            "this layer has no named components. Give out_features as a mapping of component to size."
        )
    return torch.split_with_sizes(y, list(sizes.values()), dim=-1)


class ColumnParallelLinear(ShardedModule):
    """`y = x W^T + b` with W cut by rows: weight `[out/tp, in]`, bias `[out/tp]`. Collective over tp.

    Input `[..., in]`, equal on all ranks of tp (with sequence_parallel `[s/tp, ..., in]`, this rank's share
    of the sequence); output `[..., out/tp]` (with gather_output `[..., out]`, for computation equal on all
    ranks).

    Args:
        in_features: extent of the last dim of the input.
        out_features: extent of the last dim of the whole output. A mapping from names to extents makes it of
            named components, each cut over tp and stored on its own: a rank's slice is its slice of the first
            component, then of the second, and so on.
        groups: the ranks around this one.
        bias: whether there is a bias.
        gather_output: join the output over tp.
        sequence_parallel: the input is cut along the sequence, dim 0.
        dtype: dtype of the parameters.
        device: where the parameters are.
        copies: by component, how many neighbouring ranks of tp have the same slice, for components that are
            cut into fewer slices than there are ranks. Their gradients are summed over these ranks.

    Raises:
        DeclarationError: tp does not divide the outputs or a component of them; gather_output with
            components; copies that do not divide tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        groups: ParallelGroups,
        *,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        components = None
        copies = {} if copies is None else copies
        if isinstance(out_features, int):
            local = divide_over_tp("out_features", out_features, groups)
        else:
            components = divide_components_over_tp("out_features", out_features, copies, groups)
            local = sum(components.values())
        if gather_output and components is not None:
            raise DeclarationError(
                f"gather_output would join the slices of components {list(components)} interleaved by rank. "
                f"Leave it False and gather each component of split(output) by itself."
            )
        sharding = TpSharding(dim=0, components=components, copies=copies)
        super().__init__(groups, tp_sharding={"weight": sharding, "bias": sharding})
        self.local_components = components
        self.shared_rows = sharding.shared_rows(local)
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.weight, self.bias = new_weights((local, in_features), bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs; shapes above."""
        tp = self.groups.tp
        x = gather_sequence(x, tp) if self.sequence_parallel else copy_to(x, tp)
        weight = copy_to_neighbours(self.weight, tp, self.shared_rows)
        bias = None if self.bias is None else copy_to_neighbours(self.bias, tp, self.shared_rows)
        y = F.linear(x, weight, bias)  # [..., out/tp]
        return gather_from(y, tp) if self.gather_output else y

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return the components of an output `y`, `[..., out/tp]`, in order: `[..., component/tp]`. Local.

        Raises:
            DeclarationError: the layer was made without components.
        """
        return split_components(y, self.local_components)


class ReplicatedLinear(ShardedModule):
    """`y = x W^T + b` with the whole weight `[out, in]` and bias `[out]` on every rank of tp. Local.

    Input `[..., in]`, equal on all ranks of tp (with sequence_parallel each rank's own part of the sequence);
    output `[..., out]`. For projections to few features, such as those of latent attention.

    Args:
        in_features: extent of the last dim of the input.
        out_features: extent of the last dim of the output.
        groups: the ranks around this one.
        bias: whether there is a bias.
        sequence_parallel: the input is this rank's part of the sequence, so that gradients are partial sums
            over tp; the parameters are marked, and the optimizer adds them.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Source: Megatron-Core `TELinear` with `parallel_mode="duplicated"`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: ParallelGroups,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        shape = (out_features, in_features)
        self.weight, self.bias = new_weights(shape, bias=bias, dtype=dtype, device=device)
        if sequence_parallel:
            for param in self.parameters():
                mark(param, "sequence_parallel")

    def forward(self, x: Tensor) -> Tensor:
        """Return all output features of the input's tokens."""
        return F.linear(x, self.weight, self.bias)


class QKVParallelLinear(ColumnParallelLinear):
    """The fused query, key and value projection: a column layer of components q, k, v. Collective over tp.

    With an output gate the components are q, gate, k, v.

    Input `[..., hidden]`; `split(output)` gives q `[..., heads/tp * head_dim]`, k and v
    `[..., query_groups/tp * head_dim]`. With more ranks in tp than query groups, k and v have one head each,
    the one that this rank's query heads use: `tp / query_groups` neighbours have the same one.

    Args:
        hidden_size: extent of the last dim of the input.
        num_heads: query heads.
        num_query_groups: key and value heads, each shared by `num_heads / num_query_groups` query heads.
        head_dim: extent of one head.
        groups: the ranks around this one.
        bias: whether there is a bias.
        output_gate: whether there is a component more, shaped like q, for a gate of what the heads return.
        sequence_parallel: the input is cut along the sequence, dim 0.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: tp does not divide the heads, the query groups do not, or neither of tp and the
            query groups divides the other.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_query_groups: int,
        head_dim: int,
        groups: ParallelGroups,
        *,
        bias: bool = True,
        output_gate: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if num_heads % num_query_groups:
            raise DeclarationError(
                f"num_heads {num_heads} is not a multiple of num_query_groups {num_query_groups}, so the "
                f"query heads cannot share keys evenly. Choose a divisor of {num_heads}."
            )
        # Check heads, not features: tp may divide the features although a slice would end inside of a head,
        # which computes nonsense.
        divide_over_tp("num_heads", num_heads, groups)
        copies = 1 if groups.tp.size % num_query_groups else groups.tp.size // num_query_groups
        divide_over_tp("num_query_groups", num_query_groups * copies, groups)
        queries, kv = num_heads * head_dim, num_query_groups * head_dim
        gate = {"gate": queries} if output_gate else {}
        super().__init__(
            hidden_size,
            {"q": queries, **gate, "k": kv, "v": kv},
            groups,
            bias=bias,
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=device,
            copies={"k": copies, "v": copies},
        )


class RowParallelLinear(ShardedModule):
    """`y = x W^T + b` with W cut by columns: weight `[out, in/tp]`, bias `[out]`. Collective over tp.

    Input `[..., in/tp]`; output `[..., out]`, equal on all ranks of tp (with sequence_parallel
    `[s/tp, ..., out]`).

    Args:
        in_features: extent of the last dim of the whole input.
        out_features: extent of the last dim of the output.
        groups: the ranks around this one.
        bias: whether there is a bias, added after the sum over tp.
        input_is_parallel: whether the input is cut over tp; False for an input `[..., in]` that is equal on
            all ranks.
        sequence_parallel: cut the output along the sequence, dim 0.
        dtype: dtype of the parameters.
        device: where the parameters are.

    Raises:
        DeclarationError: tp does not divide in_features; sequence_parallel with an input that is not
            parallel.
    """

    tp_sharding = {"weight": 1}  # noqa: RUF012 - read-only by its type in ShardedModule

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: ParallelGroups,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(groups)
        local = divide_over_tp("in_features", in_features, groups)
        if sequence_parallel and not input_is_parallel:
            raise DeclarationError(
                "sequence_parallel needs input_is_parallel=True: a share of the sequence cannot be cut by "
                "features too."
            )
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel
        self.weight, self.bias = new_weights((out_features, local), bias=bias, dtype=dtype, device=device)
        if self.bias is not None and sequence_parallel:
            mark(self.bias, "sequence_parallel")

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output features; shapes above."""
        tp = self.groups.tp
        if not self.input_is_parallel:
            x = scatter_to(x, tp)
        partial = F.linear(x, self.weight)  # [..., out], this rank's share of the sum
        y = reduce_scatter_sequence(partial, tp) if self.sequence_parallel else reduce_from(partial, tp)
        return y if self.bias is None else y + self.bias
