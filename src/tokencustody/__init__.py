"""tokencustody: transactional custody of the exact training tokens of reinforcement-learning rollouts."""
