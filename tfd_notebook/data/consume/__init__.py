"""Reading: streams, observed datasets and their figures."""
