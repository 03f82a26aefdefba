"""Sockets, wire formats and facts about this host, for every process."""
