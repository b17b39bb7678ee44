"""A copy of a SQLite file while it is written."""
