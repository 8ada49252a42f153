"""The recipe of a save, and its steps."""
