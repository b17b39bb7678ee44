"""The main job on real input: multi-turn rollouts against a chat model on this machine, every call captured."""
