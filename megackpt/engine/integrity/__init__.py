"""What is done about bytes that changed: found, told, worked around, made whole again."""
