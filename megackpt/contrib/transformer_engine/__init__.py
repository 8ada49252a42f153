"""Transformer Engine's modules declare themselves, under the names of our own layers.

Modules are known by the names of their classes and attributes. Transformer Engine is not imported. To import
this package is enough for `ShardedModule`, `LayerStack` and `megackpt.training.parallel.sharded_state_dict`
to accept TE modules as children:

    from megackpt.contrib import transformer_engine as te_checkpoints

    state = te_checkpoints.sharded_state_dict(model, groups)
    megackpt.save(state, path)
"""

from megackpt.contrib.transformer_engine.declare import (
    TransformerEngineMixin,
    declare_module_of_te,
    mark_parameters,
    sharded_state_dict,
)
from megackpt.contrib.transformer_engine.extra_state import (
    Fp8State,
    fill_fp8_state,
    fp8_state_of,
    join_megatron_experts,
    read_extra_state,
    write_extra_state,
)
from megackpt.contrib.transformer_engine.fp8_state import initialise_fp8_state
from megackpt.contrib.transformer_engine.names import (
    ALIASES,
    Names,
    canonical_key,
    use_stored_names,
)
from megackpt.contrib.transformer_engine.quantised import Quantised, quantise_parameters
from megackpt.contrib.transformer_engine.site import ParallelMode, set_components, set_parallel_mode
from megackpt.contrib.transformer_engine.tensors import check_zero_centred

__all__ = [
    "ALIASES",
    "Fp8State",
    "Names",
    "ParallelMode",
    "Quantised",
    "TransformerEngineMixin",
    "canonical_key",
    "check_zero_centred",
    "declare_module_of_te",
    "fill_fp8_state",
    "fp8_state_of",
    "initialise_fp8_state",
    "join_megatron_experts",
    "mark_parameters",
    "quantise_parameters",
    "read_extra_state",
    "set_components",
    "set_parallel_mode",
    "sharded_state_dict",
    "use_stored_names",
    "write_extra_state",
]
