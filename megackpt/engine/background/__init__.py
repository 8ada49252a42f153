"""Asynchronous saves: staged by the training process, written by a writer process of each rank."""
