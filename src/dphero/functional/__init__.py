"""One rule per torch function, for values that all examples share; and ``vmap`` for the rest."""
