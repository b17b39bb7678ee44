"""Calls, staged calls and their chains as bytes, and back, exact in every bit."""
