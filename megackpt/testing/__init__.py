"""Tools for testing checkpoint code: pools of real ranks, simulated worlds, data generators."""
