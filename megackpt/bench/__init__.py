"""Measuring: how fast a place takes and gives bytes, and what checkpoints of ours and of others make of it.

Owns the state that is saved, the ranks that save it, the order of the runs and what is said of them. Every
load is compared with what was saved, outside of the time that is taken.
"""
