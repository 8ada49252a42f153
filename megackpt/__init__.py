"""Distributed checkpointing of Megatron-style training: save at one parallel layout, load at any other.

The public names, and nothing else; each is described where it is defined.
"""

from megackpt.api import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from megackpt.checkpointer import Checkpointer
from megackpt.codec import register_codec
from megackpt.errors import (
    CheckpointError,
    CheckpointingException,
    CoverageError,
    DeclarationError,
    FormatError,
    GeometryError,
    IntegrityError,
    MismatchError,
    MissingKeyError,
    NotACheckpointError,
    OptimizerError,
    RankFailedError,
    StorageError,
    UnserializableError,
)
from megackpt.mapping import (
    LocalNonpersistentObject,
    ShardedLayout,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.options import LoadOptions, SaveOptions

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "CheckpointingException",
    "CoverageError",
    "DeclarationError",
    "FormatError",
    "GeometryError",
    "IntegrityError",
    "LoadOptions",
    "LocalNonpersistentObject",
    "MismatchError",
    "MissingKeyError",
    "NotACheckpointError",
    "OptimizerError",
    "RankFailedError",
    "SaveOptions",
    "ShardedLayout",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StorageError",
    "UnserializableError",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "register_codec",
    "save",
]
