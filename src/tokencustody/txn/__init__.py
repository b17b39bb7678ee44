"""What happens within one transaction: plain functions of a connection, which may run twice."""
