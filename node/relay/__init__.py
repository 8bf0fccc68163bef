"""The data plane: a client's bytes to an engine or a peer, and the answer's bytes back, unchanged."""
