"""Audits of whole trainings: many small ones, or one with many canaries."""
