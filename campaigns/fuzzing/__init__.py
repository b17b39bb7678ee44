"""Bad input for everything that reads: stored bytes, records, rows, files and command lines."""
