"""Input modes of a cluster on Spark."""

from __future__ import annotations

from enum import IntEnum


class InputMode(IntEnum):
    """Source of the rows: the user's function, or Spark.

    See Also
    --------
    tensorflowonspark.TFCluster.InputMode
    """

    #: The user's function reads its own data.
    TENSORFLOW = 0
    #: Spark feeds the rows of RDDs and DataFrames to the user's function.
    SPARK = 1
