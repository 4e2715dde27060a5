"""Where public data sets come from, and where they are kept."""
