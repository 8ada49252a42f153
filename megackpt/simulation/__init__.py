"""Jobs that need not exist: their declarations, planned for real without a process group or a GPU."""

from megackpt.simulation.arrays import job_arrays
from megackpt.simulation.holdings import holdings
from megackpt.simulation.layout import JobLayout
from megackpt.simulation.presets import PRESETS
from megackpt.simulation.sizes import ModelSizes, read_sizes
from megackpt.simulation.transformer import build_model

__all__ = ["PRESETS", "JobLayout", "ModelSizes", "build_model", "holdings", "job_arrays", "read_sizes"]
