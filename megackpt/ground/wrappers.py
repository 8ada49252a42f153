"""Steps that wrappers of modules put into the names of parameters, as torch.compile does with `_orig_mod`.

Names are equal for us if they differ by such steps alone. `module`, of DistributedDataParallel, may also be
what a user has called a layer, so callers say whether it counts.
"""

from __future__ import annotations

from collections.abc import Collection

INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Of torch.compile, FSDP1 and checkpoint_wrapper. Nobody gives a layer such a name."""

WRAPPERS = ("module", *INNER_WRAPPERS)


def without_wrappers(name: str, wrappers: Collection[str] = WRAPPERS) -> str:
    """Return a dotted name without the steps that are wrappers; its last step stays. Pure.

    >>> without_wrappers("model.module.layers.0._orig_mod.weight")
    'model.layers.0.weight'
    """
    *modules, last = name.split(".")
    return ".".join([*(step for step in modules if step not in wrappers), last])
