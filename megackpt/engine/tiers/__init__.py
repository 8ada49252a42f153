"""Saves into storage of the nodes, and loads of steps whose files lie on several nodes."""
