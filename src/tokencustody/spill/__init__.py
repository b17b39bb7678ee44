"""Marks that wait on this host because their database did not take them, and the way into it."""
