"""Checks every byte of a checkpoint against its digests."""
