"""The part of a TFCluster that runs in executors."""
