"""Other libraries' tensors and checkpoint interfaces, at the rim: imported by name, never by the core."""
