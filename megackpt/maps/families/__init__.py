"""The families of names that megackpt knows.

A module has one or several families, each with a function from a config to rules.
"""
