"""Encodes Python values as plain JSON and tensors, and decodes them; without pickle and without I/O.

For everything in a checkpoint but sharded tensors: arguments, schedules, random states, a user's objects.
`megackpt.codec.encoder` describes the encoding. `ForeignObject`, which only pickles have, is imported at its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megackpt.codec.arrays import ArrayReference
from megackpt.codec.blob import pack, unpack
from megackpt.codec.decoder import decode
from megackpt.codec.digests import leaf_digests, leaves
from megackpt.codec.encoder import encode
from megackpt.codec.stand_ins import (
    ForeignMember,
    ForeignNamedTuple,
    keep_unknown_values,
)
from megackpt.codec.tree import EncodedValue, dump_tree, load_tree
from megackpt.ground.lazy_names import lazy_names

if TYPE_CHECKING:
    from megackpt.codec.pickled import ForeignObject
else:  # type checkers would accept any name
    __getattr__ = lazy_names(__name__, {"megackpt.codec.pickled": ("ForeignObject",)})

__all__ = [
    "ArrayReference",
    "EncodedValue",
    "ForeignMember",
    "ForeignNamedTuple",
    "ForeignObject",
    "decode",
    "dump_tree",
    "encode",
    "keep_unknown_values",
    "leaf_digests",
    "leaves",
    "load_tree",
    "pack",
    "unpack",
]
