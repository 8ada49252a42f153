"""Distributed checkpointing of Megatron-style training."""
