"""The bottleneck of a pipeline: figures of its stages and data workers, decision and advice."""
