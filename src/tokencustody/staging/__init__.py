"""Worker staging: inference workers stage exact token deltas, and a trainer verifies them against a receipt."""
