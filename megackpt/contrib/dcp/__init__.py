"""torch.distributed.checkpoint (DCP) over the native format.

    dcp.save(state, storage_writer=MegackptStorageWriter("ckpt/step_100"))
    dcp.load(state, storage_reader=MegackptStorageReader("ckpt/step_100"))

DCP plans and exchanges as always; what it stores is a checkpoint that `megackpt.load` reads, and it reads
what `megackpt.save` stores. The two planners add to that megackpt's own entities and its proofs.
"""

from megackpt.contrib.dcp.load_planner import MegackptLoadPlanner
from megackpt.contrib.dcp.reader import MegackptStorageReader
from megackpt.contrib.dcp.save_planner import MegackptSavePlanner
from megackpt.contrib.dcp.writer import MegackptStorageWriter

__all__ = ["MegackptLoadPlanner", "MegackptSavePlanner", "MegackptStorageReader", "MegackptStorageWriter"]
