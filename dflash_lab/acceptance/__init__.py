"""Does it work: decoding, trees, offline metrics, protocol."""
