"""The data path: tf.data service servers, datasets that read from them, and their consumers."""
