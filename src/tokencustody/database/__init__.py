"""The ways to SQLite and PostgreSQL: addresses, pools, transactions, retries, deadlines and what is counted of them."""
