"""What is written to disk: optimizer state whole, in torch's own format, or in shards."""
