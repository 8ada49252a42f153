"""Pure functions on declared parts of global arrays: no torch, no file, no rank."""
