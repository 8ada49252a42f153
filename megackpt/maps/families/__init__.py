"""The families of names that megackpt knows: one module each, with a function from a config to rules."""
