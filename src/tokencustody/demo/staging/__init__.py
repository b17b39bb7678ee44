"""The demo with worker staging: an inference worker, a serving process and a trainer, each a process of its own."""
