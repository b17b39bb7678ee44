"""The Alembic environment and the released revisions. `tokencustody.sql.migrate` runs them."""
