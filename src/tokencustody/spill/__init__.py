"""Marks that wait on a host because the database could not be reached, and how they get there."""
