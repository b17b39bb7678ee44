"""Campaigns that attack the promises of the store and count what became of them."""
