"""Passage search: the protocol, an index in memory, one on disk, a server and its client."""
