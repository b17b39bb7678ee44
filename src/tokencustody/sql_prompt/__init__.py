"""The prompt that reads a database with SQL and changes nothing."""
