"""The only door to private names of TensorFlow and of other packages.

Each module reads the names it needs when it is imported, so an unknown version shows up there and
nowhere else; one contract test per name says which version changed.
"""
