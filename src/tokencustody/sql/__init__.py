"""Tables, dialects, transactions, the packed codec and the migrations behind the store."""
