"""Private names of TensorFlow's coordinator and eager context."""
