"""TensorFlow's tf.data service: its servers, and datasets that read from them."""
