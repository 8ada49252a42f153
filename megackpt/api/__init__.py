"""The public functions that save, load and inspect a checkpoint. `megackpt` exports them."""
