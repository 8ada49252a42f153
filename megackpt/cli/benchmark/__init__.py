"""`megackpt bench`: how fast a directory is, and how fast megackpt and other libraries save and load in it.

The modules define the state that is saved, the ranks that save it, the cases, the order of their runs, and
the report. Every load is compared with what was saved; the comparison is not timed.
"""
