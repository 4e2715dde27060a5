"""Reading the user's own files and the formats of public data sets."""
