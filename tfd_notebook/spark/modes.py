"""Who reads the data of a cluster on Spark."""

from __future__ import annotations

from enum import IntEnum


class InputMode(IntEnum):
    """Who reads the data.

    See Also
    --------
    tensorflowonspark.TFCluster.InputMode
    """

    #: The user's function.
    TENSORFLOW = 0
    #: Spark, which feeds rows of RDDs and DataFrames to the user's function.
    SPARK = 1
