"""Saves into storage of the nodes, and loads from what of it is left."""
