"""Asynchronous saves: staged by the training process, written by a process beside each rank."""
