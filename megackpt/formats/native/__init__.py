"""The native format `megackpt`, version 1: see docs/format.md."""

from megackpt.formats.native.load import NativeLoadStrategy
from megackpt.formats.native.save import NativeSaveStrategy

__all__ = ["NativeLoadStrategy", "NativeSaveStrategy"]
