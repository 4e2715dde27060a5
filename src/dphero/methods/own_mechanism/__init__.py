"""Methods with a mechanism of their own, and its price."""
