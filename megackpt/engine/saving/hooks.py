"""Which hooks a save has, by its options. The modules of features that are not used are not imported."""

from __future__ import annotations

from megackpt.engine.saving.save_hook import SaveHook
from megackpt.options import Policy, SaveOptions


def hooks_for(options: SaveOptions) -> tuple[SaveHook, ...]:
    """Return the hooks of the features that the options ask for."""
    hooks: list[SaveHook] = []
    if options.parity is not None:
        from megackpt.engine.saving.parity import ParityHook

        hooks.append(ParityHook(max_files=options.parity))
    if options.array_digests:
        from megackpt.engine.saving.array_digests import ArrayDigestHook

        hooks.append(ArrayDigestHook())
    if options.compare_replicas is not Policy.IGNORE:  # compares all bits, so no samples are needed
        from megackpt.engine.saving.replica_check import ReplicaCheckHook

        hooks.append(ReplicaCheckHook(options.compare_replicas, part_bytes=options.part_bytes))
    elif options.sample_replicas is not Policy.IGNORE:
        from megackpt.engine.saving.replica_samples import ReplicaSampleHook

        hooks.append(ReplicaSampleHook(options.sample_replicas))
    return tuple(hooks)
