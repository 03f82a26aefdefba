"""Extensions of TensorFlow's coordinator: recording, pausing and stepping closures."""
