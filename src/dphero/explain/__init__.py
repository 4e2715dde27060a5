"""Explain trainings: what networks look at, where the noise falls, and how far privacy moves both.

Only released things are looked at (weights and gradients that have left the mechanism) and public images.
"""

from dphero.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
