"""In which axis each tensor carries the examples."""
