"""`megackpt bench`: how fast a directory is, and how fast megackpt saves and loads in it.

The modules define the state that is saved, the ranks that save it, the cases, the order of their runs, and
the report. Every load is compared with what was saved; the comparison is not timed. In a checkout,
`tests/benchmarks/bench_peers.py` adds other libraries and more cases.
"""
