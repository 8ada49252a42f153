"""Public functions on whole checkpoints: inspect, verify, diff, convert and repair."""
