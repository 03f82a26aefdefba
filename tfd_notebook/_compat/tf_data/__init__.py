"""Private names of tf.data."""
