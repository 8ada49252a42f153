"""Which experts a token goes to, and with which weights: pure functions of the router's scores.

All of it is local and in float32. `router` has the layer, with the sums over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megackpt.errors import DeclarationError

ScoreFunction: TypeAlias = Literal["softmax", "sigmoid"]
BalanceUnit: TypeAlias = Literal["sequence", "micro_batch"]

# Keeps the quotient finite where all chosen scores are 0 (sigmoid of very negative logits).
_EPSILON = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """How tokens are routed, and which losses balance the experts.

    Attributes:
        top_k: experts of each token.
        score_function: what makes scores of logits: a softmax over the experts, or a sigmoid of each.
        normalise: divide the weights of a token's experts by their sum. With a softmax over all experts this
            is the softmax over the logits of the chosen ones alone.
        scaling_factor: factor on the weights, after that.
        num_groups: number of groups of neighbouring experts (those of one node or device), for
            `group_top_k`; 1 for none.
        group_top_k: groups that the experts of one token may be in.
        group_score_count: how many of its best scores a group is judged by; None for as many as a token has
            experts in each of its groups, `top_k / group_top_k`.
        balance_loss: coefficient of the load-balancing loss; 0 for none.
        balance_over: the tokens over which that loss is computed: of each sequence, or of the micro-batch.
        z_loss: coefficient of the loss on large logits; 0 for none.
        bias_rate: step by which each expert's bias changes towards an even load, without a loss; None for
            no bias, 0 for one that stays as it is. The bias decides which experts are chosen, but is no part
            of their weights.

    Raises:
        DeclarationError: a number out of range; top_k of 1 with `normalise`, which makes every weight 1, so
            that the router learns nothing.

    Source: Shazeer et al. 2017 (top-k of a softmax); Zoph et al. 2022, equation 5 (z-loss); DeepSeek-V3,
    equations 12 to 20 (sigmoid scores, bias, loss by sequence); Megatron-Core
    `moe_utils.topk_routing_with_score_function`.
    """

    top_k: int = 2
    score_function: ScoreFunction = "softmax"
    normalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    group_top_k: int = 1
    group_score_count: int | None = None
    balance_loss: float = 0.0
    balance_over: BalanceUnit = "sequence"
    z_loss: float = 0.0
    bias_rate: float | None = None

    def __post_init__(self) -> None:
        if self.score_function not in ("softmax", "sigmoid"):
            raise _not_one_of("score_function", self.score_function, "'softmax' or 'sigmoid'")
        if self.balance_over not in ("sequence", "micro_batch"):
            raise _not_one_of("balance_over", self.balance_over, "'sequence' or 'micro_batch'")
        for name in ("top_k", "num_groups", "group_top_k", "group_score_count"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DeclarationError(
                    f"RoutingOptions.{name} is {getattr(self, name)}. It must be at least 1."
                )
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if (getattr(self, name) or 0) < 0:
                raise DeclarationError(
                    f"RoutingOptions.{name} is {getattr(self, name)}. It must be at least 0."
                )
        if self.group_top_k > self.num_groups:
            raise DeclarationError(
                f"RoutingOptions.group_top_k {self.group_top_k} is larger than num_groups {self.num_groups}. "
                f"Choose at most num_groups."
            )
        if self.top_k == 1 and self.normalise:
            raise DeclarationError(
                "RoutingOptions.top_k is 1 with normalise=True: the weight of each token's only expert would "
                "always be 1, and the router would get no gradient. Set normalise=False."
            )

    def faults(self, num_experts: int) -> list[str]:
        """Return what does not fit `num_experts`, in words; empty if all does. Pure."""
        faults = []
        if num_experts % self.num_groups:
            faults.append(f"num_experts {num_experts} is not a multiple of num_groups {self.num_groups}")
        candidates = num_experts // self.num_groups * self.group_top_k
        if self.top_k > candidates:
            faults.append(
                f"top_k {self.top_k} is larger than the {candidates} experts that a token can choose from"
            )
        return faults


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: int64 `[n, top_k]`, global indices of experts.
        weights: float32 `[n, top_k]`, factors on the outputs of these experts.
    """

    experts: Tensor
    weights: Tensor


def scores_of(logits: Tensor, options: RoutingOptions) -> Tensor:
    """Return the scores `[n, experts]` of float32 logits. Pure."""
    return logits.sigmoid() if options.score_function == "sigmoid" else logits.softmax(dim=-1)


def choose_experts(scores: Tensor, bias: Tensor | None, options: RoutingOptions) -> Routing:
    """Choose each token's experts: those with the largest sum of score and bias. Pure.

    Args:
        scores: float32 `[n, experts]`.
        bias: float32 `[experts]`, added for the choice only; None for none.
        options: how to choose.

    Source: DeepSeek-V3, equations 13 to 16.
    """
    biased = scores if bias is None else scores + bias
    if options.group_top_k < options.num_groups:
        biased = _within_best_groups(biased, options)
    experts = biased.topk(options.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if options.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _EPSILON)
    return Routing(experts, weights * options.scaling_factor)


def balance_loss(
    scores: Tensor, chosen: Tensor, members: Tensor, tokens: Tensor, options: RoutingOptions
) -> Tensor:
    """Return this rank's part of the load-balancing loss; the sum of all parts is the loss. Pure, 0-dim.

    For each sequence it is the sum over the experts of f * P. f is the share of tokens that chose the
    expert; it is 1 for an even load. P is the mean score of the expert; the scores of a token add up to 1.
    The loss is the mean over the sequences.

    Args:
        scores: float32 `[n, experts]` of this rank's tokens.
        chosen: float32 `[sequences, experts]`, how many tokens of all ranks chose each expert.
        members: float32 `[sequences, n]`, 1 where a token belongs to a sequence.
        tokens: float32 `[sequences, 1]`, tokens of each sequence on all ranks.
        options: the coefficient.

    Source: DeepSeek-V3, equations 17 to 20.
    """
    share = scores / (scores.sum(dim=-1, keepdim=True) + _EPSILON)  # as it is already for a softmax
    frequency = chosen * (scores.shape[-1] / options.top_k) / tokens
    mean_score = members @ share / tokens
    return (frequency * mean_score).sum() * (options.balance_loss / members.shape[0])


def choices_for_balance(scores: Tensor, options: RoutingOptions) -> Tensor:
    """Return float32 `[n, experts]`, 1 for the top-k scores of each token. Pure.

    Neither the bias nor the groups have an influence here: the loss balances the scores themselves.

    Source: DeepSeek-V3, equation 18; Megatron-Core `moe_utils.compute_routing_scores_for_aux_loss`.
    """
    best = scores.detach().topk(options.top_k, dim=-1).indices
    return torch.zeros_like(scores).scatter_(-1, best, 1.0)


def memberships(sequences: Tensor, count: int) -> Tensor:
    """Return float32 `[count, n]`: 1 where token n belongs to the sequence with that index. Pure."""
    return F.one_hot(sequences, count).T.float()


def _within_best_groups(scores: Tensor, options: RoutingOptions) -> Tensor:
    """Set the scores of experts outside of each token's best groups to minus infinity.

    A group is as good as the sum of its best scores: as many as a token has experts in each chosen group, or
    as the options say.

    Source: DeepSeek-V3, section 2.1.2 (node-limited routing); Megatron-Core `moe_utils.group_limited_topk`.
    """
    grouped = scores.view(scores.shape[0], options.num_groups, -1)  # [n, groups, experts/groups]
    wanted = options.group_score_count
    wanted = options.top_k // options.group_top_k if wanted is None else wanted
    best = max(1, min(wanted, grouped.shape[-1]))
    quality = grouped.topk(best, dim=-1).values.sum(dim=-1)
    groups = quality.topk(options.group_top_k, dim=-1).indices
    allowed = torch.zeros_like(quality, dtype=torch.bool).scatter_(-1, groups, value=True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)


def _not_one_of(name: str, value: object, choices: str) -> DeclarationError:
    return DeclarationError(f"RoutingOptions.{name} is {value!r}. It must be {choices}.")
