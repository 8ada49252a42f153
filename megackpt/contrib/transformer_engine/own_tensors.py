"""The tensors of one module, without those of its children."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from megackpt.contrib.transformer_engine.fp8_state import declare_fp8_state
from megackpt.contrib.transformer_engine.norms import declare_zero_centred
from megackpt.contrib.transformer_engine.site import OwnTensor, Site, own_tensors
from megackpt.entities import ShardedStateDict


def declare_own(
    module: nn.Module, site: Site, tensors: Sequence[OwnTensor], *, without: Collection[str] = ()
) -> ShardedStateDict:
    """Declare the named tensors of a module, and its others as equal on all ranks of tp.

    The module's FP8 state, and that its norm is zero-centred, are declared too; its children are not.
    `without` are names that are declared otherwise.
    """
    own = own_tensors(module)
    named = {*(tensor.name for tensor in tensors), *without}
    others = [OwnTensor(name, name, None) for name in own if name not in named]
    present = [tensor for tensor in (*tensors, *others) if tensor.name in own]
    state = {
        site.prefix + tensor.name: site.declare(tensor.key, own[tensor.name], tensor.sharding)
        for tensor in present
    }
    return state | declare_zero_centred(module, site, present) | declare_fp8_state(module, site)
