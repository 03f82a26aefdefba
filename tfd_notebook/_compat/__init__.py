"""The only package that uses private names of TensorFlow and of other packages.

Each module reads the names that it needs when it is imported. An unsupported version therefore
fails at that import. One contract test per name shows which version changed.
"""
