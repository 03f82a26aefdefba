"""Closures that can be watched, paused and stepped: what is added to TensorFlow's coordinator."""
