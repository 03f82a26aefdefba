"""User interfaces: magics, the command line, widgets and the server extension."""
