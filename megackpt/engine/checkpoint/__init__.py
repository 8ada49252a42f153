"""A checkpoint in a store: its commit, its common state, and the directories of a run's steps."""
