"""The native format `megackpt`, version 1: see docs/format.md."""

from megackpt.formats.native.load import NativeLoadStrategy
from megackpt.formats.native.save import NativeSaveStrategy
from megackpt.formats.strategy import Format

FORMAT = Format(
    backend="megackpt",
    version=1,
    save=NativeSaveStrategy,
    load=NativeLoadStrategy,
    file_names=NativeSaveStrategy.file_names,
)

__all__ = ["FORMAT", "NativeLoadStrategy", "NativeSaveStrategy"]
