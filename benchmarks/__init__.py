"""The benchmark behind scripts/bench: every store on the same calls, on one disk, in one run."""
