"""Layers and optimizers in Megatron's style, and the state of a run: each declares its own parts."""
