"""Who may do what on PostgreSQL: roles by run, granted, listed and taken away."""
