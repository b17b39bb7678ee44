"""The checks, one module per capability."""
