"""Source: Megatron-Core `dist_checkpointing.tensor_aware_state_dict`, for the name."""

from megackpt.compat.megatron.refusal import refused

MCoreTensorAwareStateDict = refused(
    "MCoreTensorAwareStateDict",
    because="it serves the local checkpoints of nvidia-resiliency-ext, which this version does not keep.",
    instead="Save to a local directory with save().",
)
