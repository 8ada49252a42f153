"""The format `torch_dist`, version 1: torch.distributed.checkpoint as Megatron-Core lays it out."""

from megackpt.formats.strategy import Format
from megackpt.formats.torch_dist.load import TorchDistLoadStrategy
from megackpt.formats.torch_dist.save import TorchDistSaveStrategy

FORMAT = Format(
    backend="torch_dist",
    version=1,
    save=TorchDistSaveStrategy,
    load=TorchDistLoadStrategy,
    file_names=TorchDistSaveStrategy.file_names,
)

__all__ = ["FORMAT", "TorchDistLoadStrategy", "TorchDistSaveStrategy"]
