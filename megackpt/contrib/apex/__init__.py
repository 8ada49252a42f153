"""State and masters of Apex's optimizers, declared and restored without their state dicts.

Apex keeps master weights outside of `state_dict()`, and torch's `load_state_dict` casts its float32 moments
to the dtype of the parameters. These functions read and write the optimizers' own tensors instead:

    from megackpt.contrib import apex as apex_checkpoints

    state = {"model": model_state, "optimizer": apex_checkpoints.sharded_state_dict(optimizer, model_state)}
    megackpt.save(state, path)

Optimizers are known by the names of their classes and attributes. Apex is not imported.

Source: Apex `optimizers/*.py` and `contrib/optimizers/distributed_fused_adam.py` (2026-07).
"""

from megackpt.contrib.apex.declare import installed_apex, load_sharded_state_dict, sharded_state_dict
from megackpt.contrib.apex.gathered import declare_gathered

__all__ = ["declare_gathered", "installed_apex", "load_sharded_state_dict", "sharded_state_dict"]
