"""Letting go of rollouts that were exported or are of no use: retire, delete, gc."""
