"""Record the passes of a model on a GPU once, and replay them."""
