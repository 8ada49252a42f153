"""Other libraries' names, tensors and checkpoint interfaces. The core never imports them, nor one another."""
