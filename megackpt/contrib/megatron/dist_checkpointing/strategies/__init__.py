"""Strategies by Megatron-Core's names. Source: Megatron-Core `dist_checkpointing.strategies`."""
