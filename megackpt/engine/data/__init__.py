"""Bytes of tensors and of stored chunks, and the threads that move them."""
