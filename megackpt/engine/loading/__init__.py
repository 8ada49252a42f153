"""The recipe of a load, and its steps."""
