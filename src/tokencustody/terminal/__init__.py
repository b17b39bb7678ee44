"""How commands print, tell of waits, show progress and end on Ctrl-C, alike for all of them."""
