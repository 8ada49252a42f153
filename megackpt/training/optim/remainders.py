"""Float32 master weights as bf16 weights and int16 remainders, and back: exact, by integers.

Transformer Engine's FusedAdam (`store_param_remainders`) and Apex's DistributedFusedAdam keep only the low 16
bits of each master; the high 16 bits are those of the bf16 weight. The kernels round the weight: where the
remainder is negative as int16 (its top bit is set), the weight is the next larger bit pattern.

    split:   low = the low 16 bits as int16;  high = the high 16 bits + (low < 0)
    rebuild: high = the bits of the weight - (low < 0);  master = high << 16 | low

Both wrap at 16 bits. `weight << 16 | low` is therefore wrong for half of all values, and `master.bfloat16()`
is not the weight that belongs to a remainder: torch rounds halfway cases to even, the kernels round them away
from zero. A remainder has no meaning without exactly its weight, and its int16 value is not a number: it must
never be cast. So a checkpoint has the rebuilt float32 master, which every other optimizer can read.

Source: Transformer Engine `common/multi_tensor/adam.cu`, `AdamFunctorMasterParamRemainder`; Apex
`contrib/optimizers/distributed_fused_adam.py`, `_bf16_rem_to_fp32`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from megackpt.entities import ShardedStateDict
from megackpt.errors import MismatchError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    find_param_entities,
    make_sharded_optimizer_tensor,
)


@torch.no_grad()
def split_master(
    master: Tensor, *, weight: Tensor | None = None, remainder: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Split float32 masters into bf16 weights and int16 remainders of the same shape. Local.

    Args:
        master: float32, of any shape; all bit patterns are allowed, also NaNs.
        weight: bf16, to write the weights to; None makes a new tensor.
        remainder: int16, to write the remainders to; None makes a new tensor.

    Returns:
        weight and remainder.

    Raises:
        MismatchError: a tensor has another dtype or shape.

    >>> weight, remainder = split_master(torch.tensor([1.0, 1.00390625]))  # 1 and halfway to the next bf16
    >>> weight.tolist(), remainder.tolist()
    ([1.0, 1.0078125], [0, -32768])
    """
    if weight is None:
        weight = torch.empty(master.shape, dtype=torch.bfloat16, device=master.device)
    if remainder is None:
        remainder = torch.empty(master.shape, dtype=torch.int16, device=master.device)
    _check(master, weight, remainder)
    low, high = _halves(master.contiguous())
    remainder.copy_(low)
    # Added as integers: the next bit pattern is the next value, also from the largest finite one to infinity.
    weight.view(torch.int16).copy_(high + (low < 0))
    return weight, remainder


@torch.no_grad()
def join_master(weight: Tensor, remainder: Tensor, *, master: Tensor | None = None) -> Tensor:
    """Rebuild float32 masters from bf16 weights and their int16 remainders. Local.

    Args:
        weight: bf16, of any shape, exactly as it was split.
        remainder: int16, of the same shape.
        master: float32 and contiguous, to write the masters to; None makes a new tensor.

    Raises:
        MismatchError: a tensor has another dtype or shape.
    """
    if master is None:
        master = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    _check(master, weight, remainder)
    low, high = _halves(master)
    low.copy_(remainder)
    high.copy_(weight.view(torch.int16) - (remainder < 0).to(torch.int16))
    return master


def declare_remainder_masters(
    optimizer: Optimizer, model_sharded_state_dict: ShardedStateDict, *, state: str = "master_param"
) -> dict[int, ParamEntity]:
    """Declare the float32 masters of an optimizer that stores their remainders, by position. Local.

    The keys are `optimizer.state.fp32_param.<model key>`, as for every other form of masters. Parameters
    without such a state are left out; float32 masters are declared as they are. The data of the others is a
    new float32 tensor. Declare the same to load, load the model first, and pass what was loaded to
    `restore_remainder_masters`. Do not store the int16 state itself in addition (`exclude_keys` of
    `optim_state_to_sharding_state`).

    Args:
        optimizer: with `optimizer.state[param][state]`, as Transformer Engine's FusedAdam has it.
        model_sharded_state_dict: of the model; its entities wrap the parameters.
        state: name of the state with the masters.

    Raises:
        DeclarationError: a parameter with a master is not in model_sharded_state_dict.
        MismatchError: a master is neither float32 nor the int16 remainder of a bf16 parameter.
    """
    masters = _masters_of(optimizer, state)
    entities = find_param_entities(model_sharded_state_dict, [param for param, _ in masters.values()])
    declared = {}
    for (position, (param, master)), entity in zip(masters.items(), entities, strict=True):
        if master.dtype != torch.float32:
            master = join_master(param.detach(), master)
        declared[position] = make_sharded_optimizer_tensor(entity, master, f"optimizer.state.{MASTER}")
    return declared


@torch.no_grad()
def restore_remainder_masters(
    optimizer: Optimizer, loaded: Mapping[int, Tensor], *, state: str = "master_param"
) -> None:
    """Write loaded float32 masters into an optimizer that stores remainders. Local.

    It writes the weights, too: that of a halfway case may differ from the weight in the checkpoint, if
    another optimizer has rounded it. The remainder belongs to the weight that is written here.

    Args:
        optimizer: the one whose masters were declared.
        loaded: what a load of `declare_remainder_masters` returned.
        state: name of the state with the masters.

    Raises:
        MismatchError: a loaded tensor is not float32 or has another shape than its parameter.
    """
    for position, (param, master) in _masters_of(optimizer, state).items():
        if position not in loaded:
            continue
        if master.dtype == torch.float32:
            master.copy_(loaded[position])
        else:
            split_master(loaded[position], weight=param.detach(), remainder=master)


def is_rounded(weight: Tensor, master: Tensor) -> bool:
    """Return whether a weight has the values of its masters in its own dtype, bit for bit. Local.

    Of bf16 weights each element may be rounded as torch or as the kernels of remainders do it. NaNs count as
    equal to themselves: a run that diverged has some.
    """
    if torch.equal(master.to(weight.dtype).view(torch.uint8), weight.view(torch.uint8)):
        return True
    if weight.dtype != torch.bfloat16 or master.dtype != torch.float32:
        return False
    bits = weight.view(torch.int16)
    by_torch, by_kernel = master.bfloat16().view(torch.int16), split_master(master)[0].view(torch.int16)
    return bool(((bits == by_torch) | (bits == by_kernel)).all())


def _masters_of(optimizer: Optimizer, state: str) -> dict[int, tuple[Tensor, Tensor]]:
    """Return parameter and master by position, of the parameters that have one."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    masters = [optimizer.state.get(param, {}).get(state) for param in params]
    return {
        position: (param, master)
        for position, (param, master) in enumerate(zip(params, masters, strict=True))
        if master is not None
    }


def _halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the low and the high 16 bits of a contiguous float32 tensor, as int16."""
    halves = master.view(-1).view(torch.int16).view(*master.shape, 2)
    low, high = halves.unbind(-1)
    return (low, high) if sys.byteorder == "little" else (high, low)


def _check(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Raise unless the three belong together; a cast here would silently change values."""
    expected = {"master": torch.float32, "weight": torch.bfloat16, "remainder": torch.int16}
    tensors = {"master": master, "weight": weight, "remainder": remainder}
    wrong = any(tensors[name].dtype != dtype for name, dtype in expected.items())
    if wrong or len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        lines = [f"{name}: {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
        raise MismatchError(
            f"a float32 master is split into a bf16 weight and an int16 remainder of its shape, but these "
            f"are {'; '.join(lines)}. Do not cast one to another dtype: pass the float32 master that was "
            f"stored, or the int16 remainder with exactly the weight that it was split with."
        )
