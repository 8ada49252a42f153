"""Ranks that verify a step together: slow ones are waited for, stuck ones named, all are told the same."""

from __future__ import annotations

import threading
import time

from megackpt.comm import Group
from megackpt.engine.data.progress import Progress
from megackpt.engine.verification.collective import verify_on_all_ranks
from megackpt.engine.verification.verify import ShareReport
from megackpt.errors import StorageError
from megackpt.formats.damage import Damage
from megackpt.testing.world import SimulatedWorld

RANKS = 3
TIMEOUT_S = 1.0


def test_a_rank_whose_share_takes_longer_than_the_time_out_is_waited_for() -> None:
    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        if share[0] == 1:
            for _ in range(8):
                time.sleep(TIMEOUT_S / 4)
                progress.advance(1)
        return ShareReport(damages=(Damage(what=f"of {share}"), Damage(what="of all")))

    results = SimulatedWorld(RANKS, timeout_s=TIMEOUT_S).run(
        lambda group: verify_on_all_ranks(group, look, timeout_s=TIMEOUT_S)
    )
    assert results[0] == [Damage(what=f"of {(0, 3)}"), Damage(what="of all"), *map(_of, (1, 2))]
    assert results[1] == results[2] == results[0]


def _of(rank: int) -> Damage:
    return Damage(what=f"of {(rank, RANKS)}")


def test_a_rank_that_reads_nothing_for_so_long_is_named_and_others_stop_reading() -> None:
    disk, stopped = threading.Event(), threading.Event()

    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        if share[0] == 1:
            disk.wait()
        if share[0] == 2:
            try:
                while True:
                    time.sleep(0.01)
                    progress.advance(1)
            finally:
                stopped.set()
        return ShareReport(damages=())

    def verify(group: Group) -> list[Damage]:
        return verify_on_all_ranks(group, look, timeout_s=0.4)

    outcomes = SimulatedWorld(RANKS).outcomes(verify)
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert isinstance(outcomes[0], StorageError)
    assert outcomes[0].rank == 1
    assert "Rank 1 failed while verifying the step: nothing could be read for 0.4 s" in str(outcomes[0])
    assert stopped.wait(60)
    disk.set()


def test_a_rank_that_finds_much_damage_reports_the_first() -> None:
    def look(progress: Progress, share: tuple[int, int]) -> ShareReport:
        return ShareReport(damages=tuple(Damage(what=str(number)) for number in range(1000)))

    damages, _ = SimulatedWorld(2).run(lambda group: verify_on_all_ranks(group, look, timeout_s=60))
    assert [damage.what for damage in damages] == [*map(str, range(20)), "980 more that one rank has found"]
