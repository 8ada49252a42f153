"""Measuring: how fast a place takes and gives bytes, and what checkpoints of ours and of others make of it.

Owns the state that is saved, the ranks that save it, the order of the runs and what is said of them. Every
load is compared with what was saved, outside of the time that is taken.
"""

from megackpt.bench.goals import Goal, goals_of
from megackpt.bench.report import Figure, Report, Row
from megackpt.bench.settings import PEERS, BenchSettings
from megackpt.bench.world import run_bench

__all__ = ["PEERS", "BenchSettings", "Figure", "Goal", "Report", "Row", "goals_of", "run_bench"]
