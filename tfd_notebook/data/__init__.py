"""The data path: servers of the tf.data service, datasets through it, and who reads them."""
