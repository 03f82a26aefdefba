"""A Spark session on this machine."""
