"""A coordinate that is not given is that of the first rank along its axis."""

from __future__ import annotations

from megackpt.parallel import Coordinates, ExpertCoordinates, ParallelLayout


def test_coordinates_that_are_not_given_are_those_of_the_first_rank() -> None:
    layout = ParallelLayout(tp=2, cp=2, pp=2, dp=2, ep=2)
    assert layout.coordinates(0) == Coordinates()
    assert layout.expert_coordinates(0) == ExpertCoordinates()
