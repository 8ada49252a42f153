"""Tests of other libraries.

The folders are packages. Otherwise pytest would look for `ray/test_ray.py` in the library Ray, and import it.
"""
