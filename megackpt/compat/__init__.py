"""Faces that other libraries' users know: their module names and signatures over our core."""
