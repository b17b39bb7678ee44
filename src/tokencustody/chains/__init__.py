"""Calls of a rollout as rows to train on, without a file: each sampled token once, in its context."""
