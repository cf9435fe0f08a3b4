"""Hidden states to disk: the loop, out-of-memory retry, the sealed feature store."""
