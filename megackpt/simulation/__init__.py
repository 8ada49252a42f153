"""Jobs that need not exist: their declarations, planned for real without a process group or a GPU."""

from megackpt.parallel import ParallelLayout
from megackpt.simulation.arrays import job_arrays
from megackpt.simulation.estimate import Cluster, Estimate, advise, estimate
from megackpt.simulation.layout import layout_title, parse_layout
from megackpt.simulation.load import simulate_load
from megackpt.simulation.model import Model, check_layout
from megackpt.simulation.presets import PRESETS
from megackpt.simulation.replicas import replica_groups
from megackpt.simulation.report import PlanReport
from megackpt.simulation.save import StoredCheckpoint, simulate_save
from megackpt.simulation.sizes import ModelSizes, read_sizes
from megackpt.simulation.stored import open_stored
from megackpt.simulation.transformer import build_model

__all__ = [
    "PRESETS",
    "Cluster",
    "Estimate",
    "Model",
    "ModelSizes",
    "ParallelLayout",
    "PlanReport",
    "StoredCheckpoint",
    "advise",
    "build_model",
    "check_layout",
    "estimate",
    "job_arrays",
    "layout_title",
    "open_stored",
    "parse_layout",
    "read_sizes",
    "replica_groups",
    "simulate_load",
    "simulate_save",
]
