"""Adapters: how to read exact tokens from the response of one inference engine."""
