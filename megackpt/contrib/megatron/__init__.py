"""The face of Megatron-Core: `dist_checkpointing` with its module names and signatures, over our core.

`from megackpt.contrib.megatron import dist_checkpointing` works where `from megatron.core import
dist_checkpointing` did. `install()` puts it in that place, so that Megatron-Core itself uses it unchanged.
docs/megatron-compat.md lists every name and how it differs.
"""

from megackpt.contrib.megatron import dist_checkpointing
from megackpt.contrib.megatron.installing import install

__all__ = ["dist_checkpointing", "install"]
