"""The main job on real input: multi-turn rollouts with a chat model on this machine, each call captured."""
