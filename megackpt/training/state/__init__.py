"""State of a training run that is not tensors: random streams, data position, schedule, users' objects."""

from megackpt.training.optim.param_groups import WhenDifferent
from megackpt.training.state.data_position import DataPosition, SampleOrder
from megackpt.training.state.rank_position import RankPosition
from megackpt.training.state.rng import RngState
from megackpt.training.state.rng_sources import (
    ACTIVATION_AXES,
    DATA_AXES,
    TRACKED_AXES,
    CudaRng,
    NumpyGenerator,
    NumpyRng,
    ParallelStreams,
    PythonRng,
    RngSource,
    Seeds,
    StatesTracker,
    TorchRng,
    TrackedRng,
)
from megackpt.training.state.schedule import PROGRESS, ScheduleState
from megackpt.training.state.sharded_data import SequenceReader, ShardedData, ShardReader, ShuffleBuffer
from megackpt.training.state.training_state import (
    CommonObject,
    RankObject,
    Resumable,
    Stateful,
    TrainingState,
    loader_object,
)

__all__ = [
    "ACTIVATION_AXES",
    "DATA_AXES",
    "PROGRESS",
    "TRACKED_AXES",
    "CommonObject",
    "CudaRng",
    "DataPosition",
    "NumpyGenerator",
    "NumpyRng",
    "ParallelStreams",
    "PythonRng",
    "RankObject",
    "RankPosition",
    "Resumable",
    "RngSource",
    "RngState",
    "SampleOrder",
    "ScheduleState",
    "Seeds",
    "SequenceReader",
    "ShardReader",
    "ShardedData",
    "ShuffleBuffer",
    "Stateful",
    "StatesTracker",
    "TorchRng",
    "TrackedRng",
    "TrainingState",
    "WhenDifferent",
    "loader_object",
]
