"""A sharded state dict, flattened into the entities to store and put together again."""
