"""What a database holds, for people: runs, rollouts, and one rollout with its calls."""
