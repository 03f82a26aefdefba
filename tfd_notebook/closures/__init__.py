"""What is known of closures and who may run one: without TensorFlow."""
