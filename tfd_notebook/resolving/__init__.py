"""Finding the tasks of a cluster: a resolver for each system that knows them."""
