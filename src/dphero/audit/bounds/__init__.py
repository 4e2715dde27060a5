"""From samples to bounds on ε, and what they are compared with."""
