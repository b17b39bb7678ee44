"""A whole and checked copy of a SQLite file that is being written."""
