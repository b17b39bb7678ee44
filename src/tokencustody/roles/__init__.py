"""Who may do what on PostgreSQL: workers, trainers and auditors of runs, granted, listed and taken away."""
