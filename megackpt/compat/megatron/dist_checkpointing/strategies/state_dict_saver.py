"""Source: Megatron-Core `dist_checkpointing.strategies.state_dict_saver`, for the names."""

from megackpt.compat.megatron.refusal import refused

_STAGES = {
    "because": "it is a stage of Megatron-Core's own asynchronous save.",
    "instead": "Use save(); for asynchronous saving use megackpt.Checkpointer(async_save=True).",
}
save_state_dict_async_finalize = refused("save_state_dict_async_finalize", **_STAGES)
save_state_dict_async_plan = refused("save_state_dict_async_plan", **_STAGES)
verify_global_md_reuse = refused("verify_global_md_reuse", **_STAGES)
