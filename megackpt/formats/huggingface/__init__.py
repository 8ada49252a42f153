"""The format `huggingface`, version 1: a folder of safetensors files as transformers writes it. Read only."""

from megackpt.formats.huggingface.folder import HuggingFaceLoadStrategy
from megackpt.formats.strategy import Format

FORMAT = Format(
    backend=HuggingFaceLoadStrategy.backend,
    version=HuggingFaceLoadStrategy.version,
    load=HuggingFaceLoadStrategy,
)

__all__ = ["FORMAT", "HuggingFaceLoadStrategy"]
