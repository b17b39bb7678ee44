"""Rollouts that were exported or are of no use are let go: retire, delete, gc."""
