"""Programs that connect an agent to a kernel over ssh, Jupyter or Spark."""
