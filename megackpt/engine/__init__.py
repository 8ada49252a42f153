"""Carries plans out: reads, writes, commits."""
