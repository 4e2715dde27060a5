"""Methods that train through the engine."""
