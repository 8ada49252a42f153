"""Jobs that need not exist: their declarations, planned for real without a process group or a GPU."""

from megackpt.cli.simulation.arrays import Model, check_layout, job_arrays
from megackpt.cli.simulation.estimate import Cluster, Estimate, advise, estimate
from megackpt.cli.simulation.layout import layout_title, parse_layout
from megackpt.cli.simulation.replicas import replica_groups
from megackpt.cli.simulation.report import PlanReport
from megackpt.cli.simulation.saves_and_loads import StoredCheckpoint, simulate_load, simulate_save
from megackpt.cli.simulation.stored import open_stored
from megackpt.cli.simulation.transformer import PRESETS, ModelSizes, build_model, read_sizes
from megackpt.training.parallel import ParallelLayout

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
