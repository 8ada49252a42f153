"""Carries plans out: reads, writes, commits.

The recipes of a save and a load are `save` and `load`. `background` is asynchronous saves, `tiers` those into
storage of the nodes, `integrity` what is done about bytes that changed.
"""
