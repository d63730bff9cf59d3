"""How a client trains before its upload, one file per way."""
