"""Checks of a Spark application before a TFCluster starts."""
