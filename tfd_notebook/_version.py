"""Which version this is, for all who say so."""

VERSION = "0.1.0"
