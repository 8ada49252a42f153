"""Python values as plain JSON and tensors, and back; no pickle anywhere, no I/O.

What is neither a sharded tensor nor large ends up here: arguments, schedules, random states, a user's
objects. The encoding is described in `megackpt.codec.encoder`.
"""

from megackpt.codec.blob import pack, unpack
from megackpt.codec.decoder import decode
from megackpt.codec.digests import leaf_digests, leaves
from megackpt.codec.encoder import encode
from megackpt.codec.foreign import (
    ForeignMember,
    ForeignName,
    ForeignNamedTuple,
    ForeignObject,
    carrying_unknown,
)
from megackpt.codec.reference import ArrayReference
from megackpt.codec.tree import Encoded, dump_tree, load_tree

__all__ = [
    "ArrayReference",
    "Encoded",
    "ForeignMember",
    "ForeignName",
    "ForeignNamedTuple",
    "ForeignObject",
    "carrying_unknown",
    "decode",
    "dump_tree",
    "encode",
    "leaf_digests",
    "leaves",
    "load_tree",
    "pack",
    "unpack",
]
