"""The tables, the revisions that made them, and the comparison of a database with both."""
